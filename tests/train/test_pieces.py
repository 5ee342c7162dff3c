"""What strategies are made of, without a network: layout, orders, costs, optimizers, schedules, records."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.errors import DataError, PlanError, SpecError, UnknownName
from paceline.sync.factors import LinearShape
from paceline.train import strategies
from paceline.train.check import check
from paceline.train.comm import IN_FLIGHT, CommEvent
from paceline.train.hooks import Gradients, Sequencer, Uses
from paceline.train.layout import cut, flatten, groups_of, piece_bytes
from paceline.train.memory import blocks_of, recompute
from paceline.train.optim import LAMB, LARS, BatchGrowth, NoiseScale, scaled_lr, warmup
from paceline.train.probe import Machine, Rates
from paceline.train.profile import Layer, Profile, Profiler
from paceline.train.record import Record, read, timeline
from paceline.train.strategies.auto import choose
from paceline.train.strategies.awaited import Awaited
from paceline.train.strategies.estimate import Setting, step_s


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(64, 4000),
    st.integers(1, 5),
)
def test_pieces_cover_every_parameter_once_and_have_a_part_for_each_rank(sizes, world, least, factor):
    parameters = [(f"p{i}", nn.Parameter(torch.randn(n))) for i, n in enumerate(sizes)]
    before = {name: p.detach().clone() for name, p in parameters}
    optimizer = torch.optim.SGD([p for _, p in parameters], lr=0.1)
    (flat,) = flatten(parameters, groups_of(optimizer), world)
    pieces = cut(flat, world, least, least * factor)
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert pieces[0].start == 0 and pieces[-1].stop == flat.data.numel()
    for piece in pieces:
        assert (piece.stop - piece.start) % world == 0
        assert [piece.shard(r, world).stop for r in range(world)][-1] == piece.stop
        assert all(slot.start < piece.stop and slot.stop > piece.start for slot in piece.slots)
    assert {slot.name for piece in pieces for slot in piece.slots} == set(before)
    for name, p in parameters:
        assert torch.equal(p, before[name])


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_the_order_out_is_the_order_given_whatever_the_order_in(ready, missing):
    sequencer = Sequencer(range(8))
    out = [key for one in ready if one not in missing for key in sequencer.ready(one)]
    assert [*out, *sequencer.flush()] == list(range(8))
    assert [key for one in range(8) for key in sequencer.ready(one)] == list(range(8))


def test_gradients_are_seen_as_they_become_ready_and_the_end_of_the_pass():
    net, seen = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), []
    hooks = Gradients(net.parameters(), lambda p: seen.append(tuple(p.shape)), lambda: seen.append("done"))
    net(torch.randn(2, 3)).sum().backward()
    assert set(seen[:2]) == {(2, 4), (2,)} and set(seen[2:4]) == {(4, 3), (4,)} and seen[4:] == ["done"]
    with hooks.paused():
        net(torch.randn(2, 3)).sum().backward()
    assert len(seen) == 5


def test_a_gradient_that_is_elsewhere_is_fetched_when_somebody_looks():
    layer, elsewhere, fetched = nn.Linear(3, 4), torch.ones(4, 3), []

    def fetch():
        fetched.append(1)
        return elsewhere

    layer.weight.grad = place = Awaited(layer.weight, fetch)
    assert place.shape == (4, 3) and place.numel() == 12
    assert place.dtype == torch.float32 and not place.is_sparse
    layer(torch.ones(2, 3)).sum().backward()
    assert not fetched and layer.weight.grad is place and torch.equal(place.added, torch.full((4, 3), 2.0))
    norm = nn.utils.clip_grad_norm_([layer.weight], 1.0)
    assert float(norm) == pytest.approx(12**0.5) and float(elsewhere.norm()) == pytest.approx(1.0, rel=1e-5)
    layer.weight.grad *= 2
    assert layer.weight.grad is place and float(elsewhere.norm()) == pytest.approx(2.0, rel=1e-5)
    assert (place.numpy() == elsewhere.numpy()).all() and repr(place) == repr(elsewhere)
    assert type(place + 1) is torch.Tensor and type(place.clone()) is torch.Tensor


def test_a_weight_read_by_another_module_is_awaited_there():
    class Borrows(nn.Module):
        def __init__(self):
            super().__init__()
            self.owner, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.last(nn.functional.linear(x, self.owner.weight))

    net, asked = Borrows(), []
    uses = Uses(net, net.parameters(), lambda wanted: asked.append({id(p) for p in wanted}))
    uses.watch()
    net(torch.randn(2, 3))
    asked.clear()
    net(torch.randn(2, 3))
    assert id(net.owner.weight) in asked[0]
    assert uses.order[0] is net.owner.weight


def test_fully_connected_layers_send_what_is_least():
    # VGG-16, 128 ranks, 2 samples each: half the words of the gradient
    fc6 = LinearShape(n_in=25088, n_out=4096, rows=2)
    assert fc6.sent_bytes("gradient", 128) / fc6.sent_bytes("rows", 128) == pytest.approx(1.9, abs=0.15)
    assert LinearShape(n_in=2048, n_out=2048, rows=8).choose(2, 12.5e6, 1e11) == "factors"
    assert LinearShape(n_in=64, n_out=64, rows=4096).choose(2, 12.5e6, 1e11) == "gradient"
    assert fc6.extra_flops("factors", 4) == 3 * 2 * 2 * 25088 * 4096 and fc6.extra_flops("rows", 4) == 0


def profile(layers=8, size=(512, 512), forward=0.05, backward=0.1):
    each = tuple(
        Layer(
            name=f"l{i}.weight",
            shape=size,
            need_s=forward * i / layers,
            ready_s=backward * (layers - i) / layers,
        )
        for i in range(layers)
    )
    return Profile(layers=each, forward_s=forward, backward_s=backward, update_s=0.004)


def setting(link, world=2, **rates):
    return Setting(
        machine=Machine(latency_s=1e-4, link_Bps=link, reduce_Bps=link, flops=1e11),
        world=world,
        rates=Rates(**rates),
        cores=2,
    )


@pytest.mark.parametrize("link", [2.5e6, 12.5e6, 60e6, 125e6, 1e9, 1e11])
def test_the_model_keeps_to_its_bounds(link):
    p, at = profile(), setting(link)
    wire = p.bytes / link
    plain = step_s("allreduce", p, at)
    assert p.compute_s <= plain <= p.compute_s + wire + 0.02
    over = step_s("overlap", p, at)
    assert max(p.forward_s + p.backward_s, wire) <= over * 1.001
    # the ceiling of the gain: everything hides under the passes
    assert over >= max(wire, p.forward_s + p.backward_s) * 0.999
    assert step_s("none", p, at) == p.compute_s


def test_overlap_gains_most_where_communication_takes_as_long_as_the_passes():
    p = profile()
    gains = {
        link: step_s("allreduce", p, setting(link)) / step_s("overlap", p, setting(link))
        for link in (2e6, 2e7, 6e7, 1e8, 1e11)
    }
    assert max(gains, key=gains.get) in (6e7, 1e8)
    assert 1.1 < max(gains.values()) < 1.5
    assert gains[1e11] == pytest.approx(1, abs=0.05) and gains[2e6] == pytest.approx(1, abs=0.05)


def test_auto_says_no_where_compression_does_not_pay():
    rates = {
        "encode_s": {"terngrad": 2e-9, "dgc": 2e-9},
        "decode_s": {"terngrad": 2e-9, "dgc": 2e-9},
        "copy_s": 1e-10,
    }
    slow, fast = (choose(profile(), setting(link, **rates), ("terngrad", "dgc")) for link in (2.5e6, 1e11))
    assert (
        slow.strategy == "dgc"
        and slow.expected_s["dgc"] < slow.expected_s["terngrad"] < slow.expected_s["allreduce"] / 4
    )
    assert fast.strategy == "allreduce" and "nothing is faster" in fast.reason
    assert choose(profile(), setting(2.5e6, **rates), ()).strategy in ("allreduce", "overlap", "priority")


def test_a_compressor_that_takes_the_momentum_over_makes_the_update_cheaper():
    plain = setting(12.5e6, copy_s=1e-10)
    chosen = {"dgc": "dgc", "terngrad": "terngrad"}
    with_it, without = (
        {name: step_s(name, replace(profile(), momentum=momentum), plain) for name in chosen}
        for momentum in (True, False)
    )
    assert with_it["dgc"] == pytest.approx(without["dgc"] - 0.004 + 1.5e-10 * profile().bytes / 4)
    assert with_it["terngrad"] == without["terngrad"]


def test_messages_cost_the_passes_time_and_pieces_grow_with_the_link():
    assert [piece_bytes(link, 2) for link in (1e6, 1e8, 1e12)] == [
        (1 << 18, 1 << 20),
        (500_000, 2_000_000),
        (2 << 20, 8 << 20),
    ]
    # several senders to one port: what is in flight must fit into its queue, of 0.2 s here, where the link is
    # slow
    assert [piece_bytes(link, 4)[1] for link in (1e5, 2.4e6, 12e6, 1e8)] == [
        1 << 17,
        160_000,
        800_000,
        1_333_333,
    ]
    assert all(3 / 4 * IN_FLIGHT * piece_bytes(link, 4)[1] <= 0.2001 * link for link in (2.4e6, 12e6, 1e8))
    quick, slow = (
        replace(setting(1e11), machine=replace(setting(1e11).machine, latency_s=latency))
        for latency in (0.0, 1e-3)
    )
    # eight layers of a megabyte in two pieces, each of which goes out and comes back
    assert step_s("overlap", profile(), slow) - step_s("overlap", profile(), quick) >= 4e-3
    # of DDP's reductions only the last does not hide: twice round a ring of two
    assert 2e-3 <= step_s("ddp", profile(), slow) - step_s("ddp", profile(), quick) < 2.5e-3


def test_a_reduction_goes_round_the_ring_unless_it_is_small():
    four = setting(1e9, world=4)
    assert four.reply_s("gather", 1e6) == four.reply_s("sum", 1 << 15) == pytest.approx(
        1e-4
    ) and four.reply_s("sum", 40_000) == pytest.approx(6e-4)
    measured = replace(four, machine=replace(four.machine, reduce_latency_s=3e-4))
    assert measured.reply_s("max", 1e5) == pytest.approx(3e-4) and measured.reply_s(
        "max", 4
    ) == pytest.approx(1e-4)


def test_passes_and_encoders_share_the_cores():
    at = replace(setting(1e12), rates=Rates(encode_s={"dgc": 1e-9}), cores=8, threads=2)
    few = replace(at, cores=2)
    work = 1e-9 * sum(layer.bytes / 4 for layer in profile().layers if layer.bytes >= 4 * 1024)
    assert step_s("dgc", profile(), few) >= profile().forward_s + profile().backward_s / 2 + work
    assert step_s("dgc", profile(), at) <= step_s("dgc", profile(), few)


def test_ddp_reduces_whole_buckets_at_a_rate_of_their_own():
    at = setting(1e9)
    slower = replace(at, machine=replace(at.machine, whole_Bps=2.5e8))
    # eight megabytes: the first bucket is ready long before the end, the rest of it not
    assert step_s("ddp", profile(), slower) - step_s("ddp", profile(), at) == pytest.approx(
        7e6 * (4e-9 - 1e-9), rel=0.2
    )
    assert step_s("allreduce", profile(), slower) == step_s("allreduce", profile(), at)
    # on a link slower than both, the link decides
    behind = [replace(one, machine=one.machine.behind(1e8)) for one in (at, slower)]
    assert step_s("ddp", profile(), behind[0]) == step_s("ddp", profile(), behind[1])


def test_profiler_sees_needs_and_ready_times():
    net = nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 10))
    profiler = Profiler(net)
    for _ in range(3):
        net(torch.randn(7, 50)).sum().backward()
        profiler.stepped(1e-3)
    found = profiler.profile()
    first, _, second, _ = found.layers
    assert first.rows == second.rows == 7 and first.need_s < second.need_s and second.ready_s < first.ready_s
    assert found.update_s == 1e-3 and Profile.from_dict(json.loads(json.dumps(found.to_dict()))) == found


# -- optimizers ------------------------------------------------------------------------------------


def test_lars_and_lamb_follow_their_formulas():
    torch.manual_seed(0)
    w, g = torch.randn(4, 3), torch.randn(4, 3)
    p = nn.Parameter(w.clone())
    p.grad = g.clone()
    LARS([p], lr=0.5, momentum=0.0, weight_decay=0.01, eta=0.02).step()
    ratio = 0.02 * w.norm() / (g.norm() + 0.01 * w.norm())
    assert torch.allclose(p, w - 0.5 * ratio * (g + 0.01 * w), atol=1e-6)
    p = nn.Parameter(w.clone())
    p.grad = g.clone()
    LAMB([p], lr=0.1, weight_decay=0.01).step()
    direction = g / (g.abs() + 1e-6) + 0.01 * w
    assert torch.allclose(p, w - 0.1 * w.norm() / direction.norm() * direction, atol=1e-5)


def test_schedules():
    assert scaled_lr(0.1, 1024) == pytest.approx(0.4) and scaled_lr(0.1, 1024, rule="sqrt") == pytest.approx(
        0.2
    )
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup(optimizer, 4)
    seen = []
    for _ in range(6):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert BatchGrowth(batch=10, most=100, factor=10, at=(5, 9)).when(9) == (100, 0.1)


def test_noise_scale_is_found_from_synthetic_gradients():
    torch.manual_seed(0)
    batch, world, truth, spread = 8, 4, torch.full((200,), 0.5), 3.0
    scale = NoiseScale(batch, world, decay=0.99)
    for _ in range(400):
        own = [truth + spread / math.sqrt(batch) * torch.randn(200) for _ in range(world)]
        mean = torch.stack(own).mean(0)
        scale.update(sum(float(g.square().sum()) for g in own) / world, float(mean.square().sum()))
    assert scale.value == pytest.approx(200 * spread**2 / float(truth.square().sum()), rel=0.15)
    with pytest.raises(SpecError, match="at least 2"):
        NoiseScale(8, 1)


@pytest.mark.parametrize("kind", ["full", "selective", "recursive"])
def test_recomputation_changes_nothing_but_memory(kind):
    from paceline.catalog.models.gpt import gpt

    def gradients(how):
        torch.manual_seed(0)
        net, (ids,), loss = gpt(batch=2, seq=8, width=16, depth=4, heads=2, vocab=11, context=8)
        loss(recompute(net, how)(ids)).backward()
        return [p.grad for p in net.parameters()]

    for plain, again in zip(gradients("none"), gradients(kind), strict=True):
        assert torch.allclose(plain, again, atol=1e-6)


def test_mistakes_are_one_line():
    with pytest.raises(UnknownName, match="did you mean 'terngrad'"):
        strategies.make("ternagrad")
    for name, allowed in (
        ("overlap", "fc, least_bytes, most_bytes"),
        ("lazy", "share, interval, most, adapt, least_bytes"),
        ("terngrad:clip=2", "did you mean 'seed'"),
        ("diloco", "it has period, outer_lr, outer_momentum, island$"),
    ):
        with pytest.raises(UnknownName, match=allowed):
            strategies.make(name, speed=3)
    assert strategies.make("overlap:fc=rows,most_bytes=1000000", clip_norm=1.0).most_bytes == 1_000_000
    assert strategies.make("lazy:adapt=false,share=0.5").adapt is False
    with pytest.raises(SpecError, match="written option=value"):
        strategies.make("overlap:rows")
    with pytest.raises(SpecError, match="fc must be auto"):
        strategies.make("overlap", fc="all")
    with pytest.raises(PlanError, match="no repeated blocks"):
        blocks_of(nn.Linear(2, 2))


# -- records ---------------------------------------------------------------------------------------


def test_a_record_is_read_back_and_checked(tmp_path):
    with Record(tmp_path) as log:
        log.write("run", task="t", strategy="s", world=2)
        log.write("predicted", seconds={"forward": 0.1, "backward": 0.2, "update": 0.01, "step": 0.31})
        for step in range(1, 11):
            log.write("step", step=step, loss=1.0, forward_s=0.1, backward_s=0.3, update_s=0.01, step_s=0.41)
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write('{"kind": "st')  # killed while it wrote
    assert len(read(tmp_path)) == 12
    found = check(tmp_path)
    assert found.error == pytest.approx(0.31 / 0.41 - 1) and "backward pass: 100 ms longer" in found.parts
    with pytest.raises(DataError, match="no run at"):
        check(tmp_path / "nowhere")


def test_a_measured_timeline_has_the_format_of_a_simulated_one(tmp_path):
    events = [
        CommEvent("conv1.weight", "sum", "gradients", 4000, 10.0, 10.5),
        CommEvent("conv1.weight", "arithmetic", "gradients", 0, 10.5, 10.6),
    ]
    found = timeline(events, [("forward", 9.5, 9.8), ("backward", 9.8, 10.2)], "run")
    assert [span.start_s for span in found.spans] == pytest.approx([0, 0.3, 0.5, 1.0])
    assert {span.stream for span in found.spans} == {"compute", "communication (gradients)", "arithmetic"}
    found.save(tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) >= 4
