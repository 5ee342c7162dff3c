"""What each strategy promises of a script, and how a run is held to it.

    equal       everything that the script logged, and its parameters at the end, are those of the reference,
                but for the order of sums
    rounded     parameters are those of DDP, but for numbers on the wire in half precision
    lossy       replicas are identical bit by bit, and the loss falls as DDP's does
    free        workers do not wait for each other: the loss falls

Laws of the scripts hold under all of them: frozen layers stay, tied weights are one, a clipped update is no
longer than the limit.
"""

from dataclasses import dataclass

import torch
from scripts import CLIP, DECAY, STEPS, STOP

from paceline.train import strategies


@dataclass(frozen=True, kw_only=True)
class Contract:
    """`words` is the plan that `parallelize` is given; `kind` is one of those above, held against
    `reference`.
    """

    words: str
    kind: str
    reference: str = "ddp"
    #: largest distance from the reference, as a share of what is compared (equal) or of the whole update
    #: (rounded)
    tolerance: float = 1e-4
    #: updates that one step of all workers makes; learning rates are divided by it, as docs/training.md says
    updates: int = 1
    #: parameters may move while a worker looks at them
    unsteady: bool = False
    #: scripts in which a worker leaves out a step, and the others' rounds wait for its next one: as if free
    out_of_step: tuple[str, ...] = ()


def _equal(words, **others):
    return Contract(words=words, kind="equal", **others)


def _lossy(words):
    return Contract(words=words, kind="lossy")


def reference_of(strategy, script):
    """The reference that a script under a strategy is held against."""
    contract = CONTRACTS[strategy]
    return "ddp" if script in contract.out_of_step else contract.reference


def _free(words, **others):
    return Contract(words=words, kind="free", **others)


CONTRACTS = {
    "ddp": _equal("ddp"),
    "allreduce": _equal("allreduce"),
    "overlap": _equal("overlap"),
    "priority": _equal("priority"),
    "auto": _equal("auto"),
    "fp32": _equal("fp32"),
    "fp16": Contract(words="fp16", kind="rounded", tolerance=1e-2),
    "bf16": Contract(words="bf16", kind="rounded", tolerance=5e-2),
    "lazy": _lossy("lazy"),
    "terngrad": _lossy("terngrad"),
    "qsgd": _lossy("qsgd"),
    "signsgd": _lossy("signsgd"),
    "onebit": _lossy("onebit"),
    "powersgd": _lossy("powersgd"),
    "topk": _lossy("topk:ratio=0.1"),
    "randomk": _lossy("randomk:ratio=0.5"),
    "dgc": _lossy("dgc:ratio=0.1"),
    "local-sgd": _equal("local-sgd:period=5", reference="local"),
    "post-local": _equal("post-local:period=5,after=6", reference="post_local"),
    "diloco": _equal("diloco:period=5", reference="diloco"),
    "ps-sync": _equal("ps-sync", reference="summed_at_step", out_of_step=("scaling",)),
    "easgd-sync": _equal("easgd-sync:period=5", reference="elastic", out_of_step=("scaling",)),
    "ps-async": _free("ps-async", updates=2),
    "ps-bounded": _free("ps-bounded", updates=2),
    "ps-backup": _free("ps-backup", updates=2),
    "easgd": _free("easgd"),
    "hogwild": _free("hogwild", updates=2, unsteady=True),
    "gossip": _free("gossip"),
}

#: of those that have no line of their own, a strategy that calls itself exact promises to be DDP's equal
for _name in strategies.names():
    if _name not in CONTRACTS:
        _exact = getattr(strategies.STRATEGIES.get(_name), "exact", False)
        CONTRACTS[_name] = _equal(_name) if _exact else _lossy(_name)

EQUAL, WITHIN, REFUSED = "equal", "within", "refused"


def verdict(contract, script, found, reference):
    """Of what both ranks left: the outcome, or an AssertionError that says which promise was broken. `found`
    and `reference` are lists of logs, one for each rank."""
    said = [log.get("refused") for log in found]
    if any(said):
        return REFUSED, _refusal(said, found)
    for log in found:
        assert _finite(log), "something that was logged is not a finite number"
        LAWS[script](contract, log, reference[0])
    kind = "free" if script in contract.out_of_step else contract.kind
    _KINDS[kind](contract, script, found, reference)
    return (EQUAL if contract.kind == "equal" and contract.reference == "ddp" else WITHIN), ""


def _refusal(said, found):
    """The line that was said, which must be one, on all ranks, and before anything was trained."""
    assert all(said), f"not all ranks refuse: {said}"
    assert all("\n" not in line for line in said), f"more than a line: {said}"
    assert all(log["at_once"] for log in found), f"only after {len(found[0]['losses'])} passes: {said[0]}"
    return said[0]


# -- kinds ---------------------------------------------------------------------------------------------


def _as_reference(contract, script, found, reference):
    for rank, (mine, theirs) in enumerate(zip(found, reference, strict=True)):
        for key in theirs.keys() - {"seconds"}:
            where, off = worst(mine[key], theirs[key], key)
            assert off <= contract.tolerance, f"rank {rank}: {where} is off by {off:.2g} of its size"


def _nearly(contract, script, found, reference):
    _replicas(found)
    mine, theirs = found[0]["parameters"], reference[0]["parameters"]
    moved = distance(theirs, reference[0]["begun"])
    off = distance(mine, theirs) / moved
    assert off <= contract.tolerance, f"parameters are off by {off:.2g} of the update"


def _falling(contract, script, found, reference):
    _replicas(found)
    _falls(found, reference, 0.6)


def _loosely(contract, script, found, reference):
    _falls(found, reference, 0.4)


_KINDS = {"equal": _as_reference, "rounded": _nearly, "lossy": _falling, "free": _loosely}


def _replicas(found):
    first, second = (log["parameters"] for log in found)
    for name in first:
        assert torch.equal(first[name], second[name]), f"replicas differ in {name}"


def _falls(found, reference, share):
    """The mean loss of both ranks falls by a share, at least, of what that of the reference falls by. It
    begins where the reference does: a worker that comes late, where none waits, begins with what others have
    learnt."""
    (begun, theirs), (_, mine) = _ends(reference), _ends(found)
    assert begun - mine >= share * (begun - theirs), (
        f"the loss falls from {begun:.3f} to {mine:.3f}, that of the reference to {theirs:.3f}"
    )


def _ends(logs):
    """The mean loss of both ranks over the first tenth of the passes, and over the last."""
    curve = torch.tensor([log["losses"] for log in logs]).mean(dim=0)
    part = max(1, len(curve) // 10)
    return float(curve[:part].mean()), float(curve[-part:].mean())


# -- laws of scripts -----------------------------------------------------------------------------------


def _accumulated(contract, log, reference):
    if contract.kind == "lossy":  # a pass that was lost or counted twice shows
        longer = distance(log["parameters"], log["begun"]) / distance(
            reference["parameters"], reference["begun"]
        )
        assert 0.5 < longer < 2, f"the update is {longer:.2f} times as long as that of the reference"


def _by_hand(contract):
    """Whether a reference other than DDP says how far parameters move: an outer momentum may move them
    further than their updates.
    """
    return contract.kind == "equal" and contract.reference != "ddp"


def _clipped(contract, log, reference):
    if _by_hand(contract):
        return
    moved = distance(log["parameters"], log["begun"])
    limit = STEPS * 0.5 * CLIP
    assert moved <= limit * 1.001, f"parameters moved by {moved:.3f}, clipped updates allow {limit:.3f}"


def _scheduled(contract, log, reference):
    if _by_hand(contract):
        return
    limit = 2 * contract.updates * sum(log["rates"])
    moved = max(float((value - log["begun"][name]).abs().max()) for name, value in log["parameters"].items())
    assert moved <= limit, (
        f"a parameter moved by {moved:.3f}, which learning rates that add up to {limit / 2:.3f}"
        " do not explain"
    )
    assert moved > 0


def _skipped(contract, log, reference):
    if contract.kind != "free" and contract.reference == "ddp":
        _same(log["before"], log["after"], "the step that overflowed")


def _mean_of_history(contract, log, reference):
    if contract.unsteady:
        return
    ema = {name: value.clone() for name, value in log["start"].items()}
    for state in log["history"]:
        for name, value in ema.items():
            value.lerp_(state[name], 1 - DECAY)
    where, off = worst(log["ema"], ema, "ema")
    assert off < 1e-5, f"{where} is not the moving average of what the steps made, by {off:.2g}"
    assert not torch.equal(log["history"][-1]["head.weight"], log["history"][-2]["head.weight"])


def _kept_frozen(contract, log, reference):
    still = {name: value for name, value in log["begun"].items() if name.startswith("body.0")}
    _same(still, {name: log["parameters"][name] for name in still}, "a frozen layer")
    assert distance(log["parameters"], log["begun"]) > 0.1


def _kept_tied(contract, log, reference):
    assert all(log["tied"]), "weights are tied no more"
    assert torch.equal(log["parameters"]["output.weight"], log["parameters"]["embedding.weight"])


def _apart(contract, log, reference):
    if not contract.unsteady:
        for before, after in log["others"]:
            _same(before, after, "a module whose optimizer did not step")


def _resumed(contract, log, reference):
    assert len(log["losses"]) == STEPS, f"{len(log['losses'])} steps in place of {STEPS}"
    assert len(log["moments"]) == len(log["parameters"]) and all(log["moments"]), (
        f"moments that were saved: {log['moments']}"
    )
    before, after = log["losses"][STOP - 3 : STOP], log["losses"][STOP : STOP + 3]
    risen = (sum(after) - sum(before)) / 3
    assert risen < 0.5 * (reference["losses"][0] - sum(before) / 3), (
        f"the loss rises by {risen:.2f} where the script goes on"
    )


def _evaluated(contract, log, reference):
    if not contract.unsteady:
        where, off = worst(log["evaluations"], log["recomputed"], "evaluation")
        assert off < 1e-5, f"{where} is not what a plain copy of the model says, by {off:.2g}"


LAWS = {
    "accumulation": _accumulated,
    "clipping": _clipped,
    "schedule": _scheduled,
    "scaling": _skipped,
    "averaged": _mean_of_history,
    "frozen": _kept_frozen,
    "tied": _kept_tied,
    "several": _apart,
    "resume": _resumed,
    "evaluation": _evaluated,
}


# -- comparing -----------------------------------------------------------------------------------------


def _same(before, after, what):
    for name, value in before.items():
        assert torch.equal(value, after[name]), f"{what} changed: {name}"


def distance(one, other):
    """Norm of the difference of two models."""
    return float(torch.sqrt(sum((value - other[name]).square().sum() for name, value in one.items())))


def worst(one, other, where):
    """The place in nested lists, mappings and tensors where two differ most, and by which share of the
    larger.
    """
    if isinstance(other, dict):
        assert one.keys() == other.keys(), f"{where} has {sorted(one)} in place of {sorted(other)}"
        return max((worst(one[key], other[key], f"{where}.{key}") for key in other), key=lambda pair: pair[1])
    if isinstance(other, (list, tuple)):
        assert len(one) == len(other), f"{where} has {len(one)} entries in place of {len(other)}"
        return max(
            (worst(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True))),
            key=lambda pair: pair[1],
        )
    one, other = torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
    return where, float((one - other).abs().max() / max(1e-3, float(other.abs().max())))


def _finite(value):
    if isinstance(value, dict):
        return all(_finite(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return all(_finite(inner) for inner in value)
    return isinstance(value, str) or bool(torch.isfinite(torch.as_tensor(value, dtype=torch.float64)).all())
