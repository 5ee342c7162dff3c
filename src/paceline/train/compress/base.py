"""What a gradient compressor is: a state per parameter, an encoder, a decoder, and an exact count of bytes on
the wire.

One gradient is exchanged in one or more rounds. A round is a collective on a list of small tensors:

    max      all-reduce with MAX of one tensor: what ranks must agree on before they encode (a shared scaler)
    sum      all-reduce with SUM of each payload tensor
    gather   all-gather of the payload tensors; sizes are the same on all ranks

An engine that is to serve every compressor carries out `Compressor.exchange`, a generator of rounds, and
sends back what came. Compressors of one round can be driven by hand as well:

    shared = compressor.prepare(key, grad)            # None, or a small tensor: all-reduce it with MAX
    payload = compressor.encode(key, grad, shared)    # sum or gather it, as `compressor.collective` says
    compressor.decode(key, gathered, out)             # the mean over ranks, in `out`

`gathered` holds one list of tensors per rank after a gather, and a single list (the sums) after an
all-reduce.

A step looks like this, on every rank and for every parameter in the same order:

    compressor.begin_step(loss_scale=scaler.get_scale())     # leave it out without loss scaling
    ... exchanges ...
    compressor.next_pass()                                   # if gradients of another pass are added
    ... exchanges of these ...
    compressor.end_step(applied=True)                        # False: the optimizer skipped this step

Under loss scaling gradients arrive multiplied by `loss_scale`: state is kept in true units, so that it
survives a change of the scale, and a skipped step puts back the state from before it. A gradient that is not
finite on any rank decodes to NaN on all of them, so that all skip together.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.errors import SpecError
from paceline.spec.compression import Scheme

State = dict[str, Tensor]
#: what comes back from a round: a list per rank after a gather, one list after a reduction
Arrived = list[list[Tensor]]


@dataclass(frozen=True, slots=True)
class Round:
    """One collective that a compressor asks for."""

    #: "max", "sum" or "gather"
    op: str
    payload: list[Tensor]

    @property
    def bytes(self) -> int:
        """What one rank contributes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.payload)


class Compressor(ABC):
    """Makes gradients small for the wire; one object serves all parameters of a model on one rank.

    Results in `out` are the same bits on all ranks if what arrives is.
    """

    #: entries of a parameter's state that differ between ranks; the others are the same everywhere
    local_state: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, scheme: Scheme, *, rank: int = 0, world: int = 1, seed: int = 0, fused: bool = True
    ) -> None:
        if not 0 <= rank < world:
            raise SpecError(f"rank must be from 0 to world - 1; got rank={rank}, world={world}")
        self.scheme = scheme
        self.rank, self.world, self.seed, self.fused = rank, world, seed, fused
        #: optimizer steps taken, skipped ones not counted
        self.step = 0
        #: attempts, skipped ones counted: random numbers are not used twice
        self.attempt = 0
        #: backward passes of this step before the one whose gradients are exchanged now
        self.passes = 0
        self.loss_scale = 1.0
        self.state: dict[str, State] = {}
        self._saved: dict[str, State | None] | None = None
        #: what `decode` needs of what `encode` saw, by key
        self._pending: dict[str, Tensor] = {}

    @property
    def name(self) -> str:
        """As in `paceline.spec.compression.SCHEMES`."""
        return self.scheme.name

    @property
    def collective(self) -> str:
        """What the payload needs: "all_reduce" or "all_gather"."""
        return self.scheme.collective

    def wire_bytes(self, shape: int | Sequence[int]) -> int:
        """Bytes one rank contributes for a float32 gradient of that shape (or of so many elements), in this
        step.

        Without what `prepare` asks for: see `shared_bytes`.
        """
        return self.scheme.payload_bytes(shape, self.step)

    def shared_bytes(self, shape: int | Sequence[int]) -> int:
        """Bytes of what ranks agree on first."""
        return self.scheme.shared_bytes(shape)

    # ---- one gradient

    def prepare(self, key: str, grad: Tensor) -> Tensor | None:
        """What must be all-reduced with MAX before `encode`, if anything."""
        return None

    @abstractmethod
    def encode(self, key: str, grad: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        """What this rank contributes; `grad` is left as it is, `shared` is what `prepare` returned,
        reduced.
        """

    @abstractmethod
    def decode(self, key: str, gathered: Arrived, out: Tensor) -> None:
        """The mean over ranks of what was encoded, written into `out` (`grad` itself may be given)."""

    def exchange(self, key: str, grad: Tensor, out: Tensor) -> Generator[Round, Arrived, None]:
        """Rounds that bring the mean over ranks into `out`; send back what each one brought.

        rounds = compressor.exchange(key, grad, out)
        request = next(rounds)
        while True:
            try: request = rounds.send(carry_out(request))
            except StopIteration: break
        """
        shared = self.prepare(key, grad)
        if shared is not None:
            shared = (yield Round("max", [shared]))[0][0]
        payload = self.encode(key, grad, shared)
        self.decode(key, (yield Round("gather" if self.collective == "all_gather" else "sum", payload)), out)

    # ---- a step

    def begin_step(self, *, loss_scale: float | None = None) -> None:
        """Before the first gradient of a step; with `loss_scale`, the step may turn out to be skipped."""
        if loss_scale is not None and not 0 < loss_scale < float("inf"):
            raise SpecError(f"loss_scale must be positive and finite; got {loss_scale}")
        self.loss_scale = 1.0 if loss_scale is None else loss_scale
        self._saved = None if loss_scale is None else {}
        self.passes = 0

    def next_pass(self) -> None:
        """Before gradients that are added to those of this step which were exchanged already."""
        self.passes += 1

    def end_step(self, *, applied: bool = True) -> None:
        """After the optimizer; `applied=False` puts back the state from before this step."""
        self.attempt += 1
        if applied:
            self.step += 1
        elif self._saved is None:
            raise SpecError(
                "a step can be undone only if begin_step was told its loss_scale; got begin_step()"
                " without one"
            )
        else:
            for key, saved in self._saved.items():
                if saved is None:
                    self.state.pop(key, None)
                else:
                    self.state[key] = saved
        self._saved = None

    def _entry(self, key: str) -> State:
        """The state of a parameter, about to be changed: kept first if the step may be undone."""
        if self._saved is not None and key not in self._saved:
            found = self.state.get(key)
            self._saved[key] = (
                None if found is None else {name: tensor.clone() for name, tensor in found.items()}
            )
        return self.state.setdefault(key, {})

    def _tensor(self, key: str, name: str, like: Tensor) -> Tensor:
        """A tensor of a parameter's state, flat float32, zeros at first."""
        entry = self._entry(key)
        if name not in entry:
            entry[name] = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
        elif entry[name].numel() != like.numel():
            raise SpecError(
                f"state of {key!r} has {entry[name].numel()} elements, its gradient has {like.numel()}; load"
                " the state of this model"
            )
        return entry[name]

    def _seed(self, key: str, *, shared: bool = False) -> int:
        """32 bits for the random numbers of a parameter in this pass; `shared`: the same on all ranks."""
        who = "all" if shared else self.rank
        later = f"/{self.passes}" if self.passes else ""
        return zlib.crc32(f"{self.seed}/{key}/{self.attempt}/{who}{later}".encode())

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors (copies) that `load_state_dict` takes."""
        parameters = {
            key: {name: tensor.clone() for name, tensor in entry.items()} for key, entry in self.state.items()
        }
        return {
            "scheme": self.scheme.to_dict(),
            "world": self.world,
            "rank": self.rank,
            "seed": self.seed,
            "step": self.step,
            "attempt": self.attempt,
            "parameters": parameters,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where `state_dict` stopped; a state of another world size goes through `reshard` first."""
        if state["scheme"]["name"] != self.name:
            raise SpecError(
                f"this is the state of {state['scheme']['name']!r}, not of {self.name!r}; build that"
                " compressor"
            )
        if state["world"] != self.world:
            raise SpecError(
                f"this is the state of {state['world']} ranks, not of {self.world}; pass all ranks' states"
                " through reshard()"
            )
        self.seed, self.step, self.attempt = state["seed"], state["step"], state["attempt"]
        self.state = {
            key: {name: tensor.clone() for name, tensor in entry.items()}
            for key, entry in state["parameters"].items()
        }
        self._saved = None

    @classmethod
    def reshard(cls, states: Sequence[Mapping[str, Any]], *, rank: int, world: int) -> dict[str, Any]:
        """The state of one of `world` ranks, from the states of all ranks of a run of another size.

        What is owed to the model is the mean over ranks of what each still holds back; each new rank holds
        back just that mean, so that the mean over any number of them is the same.
        """
        if not states or sorted(s["rank"] for s in states) != list(range(states[0]["world"])):
            raise SpecError(
                "the states of all ranks are needed, each once; got ranks"
                f" {sorted(s['rank'] for s in states)}"
            )
        ordered = sorted(states, key=lambda s: int(s["rank"]))
        first = ordered[0]
        parameters = {
            key: {
                name: (
                    _mean(s["parameters"][key][name] for s in ordered)
                    if name in cls.local_state
                    else tensor.clone()
                )
                for name, tensor in entry.items()
            }
            for key, entry in first["parameters"].items()
        }
        return {**first, "rank": rank, "world": world, "parameters": parameters}


def flat(grad: Tensor) -> Tensor:
    """A gradient as the kernels take it: one dimension, contiguous, float32; a view where that is
    possible.
    """
    return grad.detach().reshape(-1).to(torch.float32).contiguous()


@contextmanager
def writing(out: Tensor) -> Generator[Tensor, None, None]:
    """`out` as the kernels write it: itself where that is possible, otherwise copied at the end."""
    direct = out.is_contiguous() and out.dtype == torch.float32
    target = (
        out.detach().view(-1) if direct else torch.empty(out.numel(), dtype=torch.float32, device=out.device)
    )
    yield target
    if not direct:
        out.detach().copy_(target.view(out.shape))


def _mean(tensors: Iterable[Tensor]) -> Tensor:
    """Over ranks, summed in double precision."""
    held = list(tensors)
    total = torch.zeros_like(held[0], dtype=torch.float64)
    for tensor in held:
        total += tensor
    return (total / len(held)).to(held[0].dtype)
