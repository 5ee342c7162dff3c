"""Recomputation policies on real modules: the same bits, less memory, and what is refused."""

import pytest

torch = pytest.importorskip("torch", reason="policies are for modules of torch")
from torch import nn  # noqa: E402
from torch.nn.utils.parametrizations import spectral_norm  # noqa: E402

import paceline as pl  # noqa: E402
from paceline.capture import host_store  # noqa: E402
from paceline.capture.recompute import apply  # noqa: E402
from paceline.catalog import devices  # noqa: E402
from paceline.catalog.models.cnn import resnet  # noqa: E402
from paceline.catalog.models.gpt import gpt  # noqa: E402
from paceline.cost.memory import memory  # noqa: E402
from paceline.errors import PlanError, SpecError  # noqa: E402
from paceline.spec.recomputation import RecomputePolicy, RecomputeSpan  # noqa: E402
from paceline.train import recompute  # noqa: E402

BLOCKS = tuple(f"blocks.{i}" for i in range(6))


def span(*modules, keep=()):
    return RecomputeSpan(modules=modules, keep=keep)


def policy(*spans, offload=()):
    return RecomputePolicy(spans=spans, offload=offload)


def small_gpt():
    net, inputs, loss = gpt(batch=2, seq=8, width=16, depth=6, heads=2, vocab=11, context=8, p=0.1)
    return net, inputs, loss


def small_resnet():
    net, _, _ = resnet(batch=2, image=32, layers=(2, 2, 1, 1))
    return net, (torch.randn(2, 3, 32, 32),), lambda y: y.square().mean()


def trained(make, how=None, amp=False):
    """Gradients of two steps, buffers, and the next random number."""
    torch.manual_seed(0)
    net, inputs, loss = make()
    if how is not None:
        recompute(net, how)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            value = loss(net(*inputs))
        value.backward()
    return [*(p.grad for p in net.parameters()), *net.buffers(), torch.rand(2)]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


NESTED = policy(span(*BLOCKS[:5]), span(*BLOCKS[1:5]), span(*BLOCKS[2:5]), span("blocks.3"))


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize(
    "how",
    [
        "full",
        "selective",
        "recursive",
        policy(span(*BLOCKS[:3]), span(*BLOCKS[:2]), span(BLOCKS[4])),
        NESTED,
        policy(*(span(block, keep=("products", "attention")) for block in BLOCKS)),
        policy(span(*BLOCKS, "norm", "head")),
    ],
    ids=["full", "selective", "recursive", "shared start", "nested", "keep", "to the head"],
)
def test_a_transformer_gets_the_same_bits(how, amp):
    assert same(trained(small_gpt, amp=amp), trained(small_gpt, how, amp))


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
def test_batch_norms_get_the_same_bits_and_count_a_step_once(amp):
    how = policy(
        span("stem", "stem_pool", "stage1.0"),
        span("stage1.1", "stage2.0"),
        span("stage2.1", "stage3.0", keep=("convolutions",)),
    )
    assert same(trained(small_resnet, amp=amp), trained(small_resnet, how, amp))


def test_offloaded_activations_come_back(monkeypatch):
    monkeypatch.setattr(host_store, "LEAST_BYTES", 64)
    how = policy(span("blocks.5"), offload=BLOCKS[:4])
    assert same(trained(small_gpt), trained(small_gpt, how))
    net, inputs, loss = small_gpt()
    store = apply(net, how)
    loss(net(*inputs))
    assert store.sent_bytes > 10_000


@pytest.mark.parametrize("gaps", [False, True])
def test_views_go_to_the_host_without_their_gaps_and_come_back_with_them(monkeypatch, gaps):
    monkeypatch.setattr(host_store, "LEAST_BYTES", 64)
    fused = torch.randn(4, 96)
    view = fused[:, 32:64] if gaps else fused.t()
    store = host_store.HostStore()
    parcel = store._pack(view)
    assert parcel.host.untyped_storage().nbytes() == view.numel() * 4 == store.sent_bytes
    back = store._unpack(parcel)
    assert torch.equal(back, view) and back.stride() == view.stride()


def test_no_gradients_no_checkpoints():
    torch.manual_seed(0)
    net, inputs, _ = small_gpt()
    plain = net.eval()(*inputs)
    with torch.no_grad():
        assert torch.equal(recompute(net, NESTED)(*inputs), plain)


def test_an_exception_leaves_the_model_usable():
    torch.manual_seed(0)
    net, inputs, loss = small_gpt()
    recompute(net, policy(span(*BLOCKS[:4])))
    broken = net.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(*inputs)
    broken.remove()
    torch.manual_seed(3)
    loss(net(*inputs)).backward()
    torch.manual_seed(0)
    plain, _, _ = small_gpt()
    torch.manual_seed(3)
    loss(plain(*inputs)).backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in net.parameters()])


# -- what is refused -------------------------------------------------------------------------------


class Skipping(nn.Module):
    """Two layers with something between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x) + x)


def test_modules_with_something_between_are_refused():
    net = recompute(Skipping(), policy(span("a", "b")))
    with pytest.raises(PlanError, match=r"do not run one directly after the other.*Linear, Linear"):
        net(torch.randn(2, 4, requires_grad=True))


def test_other_arguments_have_to_be_the_same():
    class Masked(nn.Module):
        def forward(self, x, scale):
            return x * scale

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Masked(), Masked()

        def forward(self, x, second):
            return self.b(self.a(x, 2.0), second)

    net = recompute(Two(), policy(span("a", "b")))
    x = torch.randn(2, 4, requires_grad=True)
    net(x, 2.0).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 4.0))
    with pytest.raises(PlanError, match="same other arguments"):
        net(x, 3.0)


def test_modules_that_run_in_another_order_are_refused():
    net = recompute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), policy(span("1", "0")))
    with pytest.raises(PlanError):
        net(torch.randn(2, 4, requires_grad=True))


def test_buffers_that_change_as_the_module_runs_are_refused():
    net = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.ReLU())
    with pytest.raises(PlanError, match="changes its buffer"):
        recompute(net, policy(span("0")))(torch.randn(2, 4))


def test_an_unknown_path_names_the_nearest():
    with pytest.raises(PlanError, match=r"'block.3', which the model does not have; did you mean 'blocks"):
        recompute(small_gpt()[0], policy(span("block.3")))


@pytest.mark.parametrize("how", ["half", 3])
def test_an_unknown_kind_lists_what_there_is(how):
    with pytest.raises(PlanError, match="none, selective, full, recursive"):
        recompute(small_gpt()[0], how)


def test_checkpointing_and_a_policy_are_one_too_many():
    with pytest.raises(SpecError, match="not both"):
        pl.capture("gpt2", recompute=NESTED, checkpointing=True)


# -- what is predicted -----------------------------------------------------------------------------


def measured_peak(step):
    """The most bytes that torch's allocator had given out during a step beyond those from before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@pytest.mark.parametrize(
    "how",
    [
        policy(),
        policy(*map(span, BLOCKS)),
        policy(*(span(block, keep=("products", "attention")) for block in BLOCKS)),
        policy(span(*BLOCKS[:3]), span(*BLOCKS[3:])),
        NESTED,
    ],
    ids=["plain", "each block", "keep", "halves", "nested"],
)
def test_the_captured_peak_is_the_measured_one(how):
    def build():
        return gpt(batch=4, seq=64, width=128, depth=6, heads=4, vocab=200, context=64)

    with torch.device("meta"):
        workload = pl.capture(build(), recompute=how or None, optimizer="sgd-plain", fold=False)
    predicted = memory(workload, devices.get("haswell-cori")).peak_bytes - sum(workload.resident.values())
    net, inputs, loss = build()
    if how:
        recompute(net, how)

    def step():
        loss(net(*inputs)).backward()
        net.zero_grad(set_to_none=True)

    step()
    assert predicted == pytest.approx(measured_peak(step), rel=0.01)


def test_a_second_run_is_a_phase_of_the_capture():
    plain = pl.capture("gpt2", batch=1, seq=64)
    again = pl.capture("gpt2", batch=1, seq=64, recompute=policy(span(*(f"blocks.{i}" for i in range(12)))))
    extra = [op for i in again.order for op in again.segments[i].ops if op.phase == "recompute"]
    assert sum(op.flops for op in extra) == pytest.approx(again.flops - plain.flops)
    # all blocks run once more; the head is in none
    forward = sum(op.flops for i in plain.order for op in plain.segments[i].ops if op.phase == "forward")
    head = 2 * 64 * 768 * 50_257
    assert again.flops - plain.flops == pytest.approx(forward - head)


def test_what_is_kept_is_not_computed_again():
    keep = ("products", "attention")
    how = policy(*(span(f"blocks.{i}", keep=keep) for i in range(12)))
    assert (
        pl.capture("gpt2", batch=1, seq=64, recompute=how).flops == pl.capture("gpt2", batch=1, seq=64).flops
    )
