"""What a server does with updates, without processes: modes, duplicates, checkpoints; and what payloads look
like.
"""

import pytest
import torch

from paceline.errors import RunError, SpecError, UnknownName
from paceline.train.asynchronous.codecs import codec
from paceline.train.asynchronous.flat import FlatVector
from paceline.train.asynchronous.policy import UpdatePolicy
from paceline.train.asynchronous.remote import Early
from paceline.train.asynchronous.shard import AGAIN, APPLIED, LATE, WAITING, ParameterRun, Shard


def shard(workers=2, lr=1.0, count=4, **policy):
    made = Shard(
        torch.zeros(count),
        [ParameterRun(count=count, options={"lr": lr})],
        torch.optim.SGD,
        UpdatePolicy(workers=workers, **policy),
    )
    for worker in range(workers):
        made.join(worker)
    return made


ONE = torch.ones(4)


def test_async_applies_at_once_and_counts_staleness():
    made = shard()
    assert made.push(0, 1, 0, ONE).staleness == 0
    outcome = made.push(1, 1, 0, ONE)
    assert (outcome.kind, outcome.staleness) == (APPLIED, 1)
    assert made.version == 2 and made.values.tolist() == [-2.0] * 4
    assert dict(made.seen) == {0: 1, 1: 1}


def test_an_update_sent_again_is_not_applied_again():
    made = shard()
    made.push(0, 1, 0, ONE)
    assert made.push(0, 1, 0, ONE).kind == AGAIN
    assert made.version == 1 and made.values.tolist() == [-1.0] * 4


def test_sync_applies_the_mean_of_all():
    made = shard(mode="sync")
    assert made.push(0, 1, 0, ONE).kind == WAITING and made.held(0)
    assert made.push(1, 1, 0, 3 * ONE).kind == APPLIED
    assert not made.held(0) and made.values.tolist() == [-2.0] * 4 and made.version == 1


def test_sync_does_not_wait_for_the_dead():
    made = shard(mode="sync", workers=3)
    made.push(0, 1, 0, ONE)
    made.push(1, 1, 0, ONE)
    assert made.held(0)
    made.leave(2)
    assert not made.held(0) and made.version == 1


def test_backup_drops_the_late():
    made = shard(mode="backup", workers=3, backups=1)
    made.push(0, 1, 0, ONE)
    made.push(1, 1, 0, ONE)
    assert made.version == 1
    assert made.push(2, 1, 0, 100 * ONE).kind == LATE
    assert made.values.tolist() == [-1.0] * 4 and made.dropped == 1


def test_bounded_staleness_holds_the_fast():
    made = shard(mode="bounded", staleness=2)
    for number in range(1, 4):
        made.push(0, number, made.version, ONE)
    assert made.held(0)
    made.push(1, 1, 0, ONE)
    assert not made.held(0)
    made.leave(1)
    made.push(0, 4, made.version, ONE)
    assert not made.held(0)


def test_staleness_aware_rate():
    made = shard(staleness_aware=True)
    for number in range(1, 5):
        made.push(0, number, made.version, ONE)
    made.push(1, 1, 0, ONE)  # four updates old: a quarter of the learning rate
    assert made.values[0].item() == pytest.approx(-4.25)


def test_elastic_pull_is_mutual():
    made = shard(rule="elastic", elasticity=0.25)
    made.push(0, 1, 0, 8 * ONE)
    assert made.values.tolist() == [2.0] * 4 and made.answer(0).tolist() == [2.0] * 4
    together = shard(rule="elastic", mode="sync", elasticity=0.25)
    together.push(0, 1, 0, 8 * ONE)
    together.push(1, 1, 0, 4 * ONE)
    assert together.values.tolist() == [3.0] * 4
    assert (together.answer(0)[0].item(), together.answer(1)[0].item()) == (2.0, 1.0)


def test_checkpoint_goes_on_where_it_was():
    first, second = shard(mode="sync"), shard(mode="sync")
    first.push(0, 1, 0, ONE)
    first.push(1, 1, 0, ONE)
    first.push(0, 2, 1, ONE)  # waits for the other: not part of the checkpoint
    second = Shard(
        torch.zeros(4),
        [ParameterRun(count=4, options={"lr": 1.0})],
        torch.optim.SGD,
        UpdatePolicy(workers=2, mode="sync"),
    )
    second.restore(first.state())
    assert second.version == 1 and second.values.tolist() == [-1.0] * 4
    second.join(0)
    assert second.push(0, 1, 0, ONE).kind == AGAIN
    assert second.push(0, 2, 1, ONE).kind == WAITING  # waits until the other worker is back
    second.join(1)
    assert second.push(1, 2, 1, ONE).kind == APPLIED and second.version == 2


def test_momentum_and_groups_match_one_process():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    plain = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.01}],
        momentum=0.9,
        lr=0.5,
    )
    flat = FlatVector(plain)
    pieces = flat.shards(3)
    assert (
        sum(size for size, _ in pieces) == flat.count
        and max(size for size, _ in pieces) - min(size for size, _ in pieces) <= 1
    )
    made = [
        Shard(start, parts, torch.optim.SGD, UpdatePolicy())
        for start, (_, parts) in zip(flat.values().split([size for size, _ in pieces]), pieces, strict=True)
    ]
    for number in range(1, 4):
        model(torch.randn(4, 5)).square().sum().backward()
        for one, piece in zip(made, flat.gradients().split([size for size, _ in pieces]), strict=True):
            one.push(0, number, number - 1, piece)
        plain.step()
        plain.zero_grad()
    assert torch.allclose(torch.cat([one.answer(0) for one in made]), flat.values(), atol=1e-6)


def test_pieces_of_servers_are_those_of_the_whole():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    flat = FlatVector(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, 5)).square().sum().backward()
    sizes = [size for size, _ in flat.shards(4)]
    for pieces, whole in zip(flat.pieces(sizes), flat.gradients().split(sizes), strict=True):
        assert torch.equal(flat.gathered(pieces), whole)


class Sent:
    """What a worker would send, in place of the servers."""

    def __init__(self, sizes):
        self.sizes, self.sent = sizes, []

    def begin(self, server, piece, *, options):
        self.sent.append((server, piece))

    def finish(self):
        return None, None


def test_overlap_sends_the_last_layers_first_and_once():
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    flat, sent = FlatVector(torch.optim.SGD(model.parameters(), lr=0.1)), Sent([30, 30])
    early = Early(flat, sent)
    model(torch.randn(4, 5)).square().sum().backward()
    assert [server for server, _ in sent.sent] == [1, 0]
    assert torch.equal(torch.cat([piece for _, piece in reversed(sent.sent)]), flat.gradients())
    with pytest.raises(RunError, match="accumulate"):
        model(torch.randn(4, 5)).square().sum().backward()
    early.finish()
    model[1](torch.randn(4, 5)).square().sum().backward()  # the first layer has no gradient in this pass
    early.finish()
    assert [server for server, _ in sent.sent] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("name", "size"), [("none", 4000), ("fp16", 2000), ("bf16", 2000), ("int8", 1004), ("topk:0.1", 800)]
)
def test_codecs_round_trip(name, size):
    torch.manual_seed(0)
    value = torch.randn(1000)
    made = codec(name)
    raw = made.encode(value)
    assert raw.dtype == torch.uint8 and raw.numel() == size
    back = made.decode(raw, 1000)
    if name.startswith("topk"):
        kept = back != 0
        assert kept.sum() == 100 and torch.equal(back[kept], value[kept])
        # what was left out comes with the next one
        assert torch.allclose(
            back + made.decode(made.encode(torch.zeros(1000)), 1000),
            torch.where(kept, value, made_next(value, kept)),
            atol=1e-6,
        )
    else:
        assert torch.allclose(back, value, atol=0.04)


def made_next(value, kept):
    """The largest tenth of what was left."""
    left = torch.where(kept, torch.zeros(1000), value)
    out = torch.zeros(1000)
    index = left.abs().topk(100).indices
    out[index] = left[index]
    return out


def test_refuses():
    with pytest.raises(UnknownName, match="fp16"):
        codec("fp61")
    with pytest.raises(SpecError, match="share"):
        codec("topk:2")
    with pytest.raises(SpecError, match="did you mean 'async'"):
        UpdatePolicy(mode="asinc")
    with pytest.raises(SpecError, match="backups"):
        UpdatePolicy(mode="backup", workers=2, backups=2)
    with pytest.raises(SpecError, match="elastic"):
        UpdatePolicy(mode="bounded", rule="elastic")


def test_options_of_an_update_are_those_of_its_worker():
    options = {"lr": 1.0, "momentum": 0.0}
    parts = [ParameterRun(count=2, options=options), ParameterRun(count=2, options=options, group=1)]
    shard = Shard(torch.zeros(4), parts, torch.optim.SGD, UpdatePolicy(workers=1))
    shard.join(0)
    shard.push(0, 1, 0, ONE, [{"lr": 0.5}, {"lr": 0.25}])
    assert (-shard.values).tolist() == [0.5, 0.5, 0.25, 0.25]
    shard.push(0, 2, 1, ONE, [{"lr": 0.0}, {"lr": 1.0}])
    assert (-shard.values).tolist() == [0.5, 0.5, 1.25, 1.25]
    again = Shard(torch.zeros(4), parts, torch.optim.SGD, UpdatePolicy(workers=1))
    again.restore(shard.state(), same_run=False)
    again.join(0)
    assert again.push(0, 1, again.version, ONE).kind == APPLIED  # of another run: not one of before
