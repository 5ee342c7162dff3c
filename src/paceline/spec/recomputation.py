"""Which activations a step keeps, which it computes again in the backward pass, and which go to host memory.

A policy names modules of a model by path, so that it can be written to a file, predicted from
(`paceline.capture(..., recompute=policy)`) and run (`paceline.train.recompute(model, policy)`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SpecError, UnknownName

FORMAT = 1

#: kinds of operators whose results a span may keep -> torch's operators, on all devices
KEEPABLE: dict[str, tuple[str, ...]] = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"),
    "convolutions": ("convolution",),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "recurrent": ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell"),
    "norms": (
        "native_layer_norm",
        "native_group_norm",
        "_fused_rms_norm",
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
    ),
    "softmax": ("_softmax", "_log_softmax"),
    "pooling": ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"),
    "dropout": ("native_dropout", "bernoulli_"),
    "activations": ("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "hardswish", "mish"),
}


#: what captures call operators that they log as one -> the kind
_AS_ONE = {"scaled_dot_product_attention": "attention", "rnn": "recurrent", "rms_norm": "norms"}
_KIND_OF = {name: kind for kind, names in KEEPABLE.items() for name in names} | _AS_ONE


def kind_of(operator: str) -> str | None:
    """The kind of a captured operator, such as `aten.addmm`, where a span may keep its results."""
    return _KIND_OF.get(operator.rpartition(".")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSpan:
    """Modules that run one after the other, by path. What enters the first is kept; the rest is computed
    again in the backward pass, except results of the kinds of operators in `keep` (`KEEPABLE`).
    """

    modules: tuple[str, ...]
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.modules:
            raise SpecError("a span of a recomputation policy names no module")
        for kind in self.keep:
            if kind not in KEEPABLE:
                raise UnknownName("kind of operator", kind, KEEPABLE, f"allowed: {', '.join(KEEPABLE)}")

    def __str__(self) -> str:
        first, last = self.modules[0], self.modules[-1]
        words = first if len(self.modules) == 1 else f"{first} to {last}"
        return f"{words} (keep {', '.join(self.keep)})" if self.keep else words


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePolicy:
    """Spans to compute again, which may lie within one another, and modules whose kept activations go to host
    memory between the passes.
    """

    spans: tuple[RecomputeSpan, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for i, one in enumerate(self.spans):
            for other in self.spans[i + 1 :]:
                _check_nesting(one, other)

    def __bool__(self) -> bool:
        return bool(self.spans or self.offload)

    @property
    def outer(self) -> tuple[RecomputeSpan, ...]:
        """Spans that lie in no other."""
        return tuple(
            span
            for span in self.spans
            if not any(_within(span.modules, other.modules) for other in self.spans if other is not span)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` turns back into an equal policy."""
        return {"paceline_recompute": FORMAT, **asdict(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any], where: str = "policy") -> RecomputePolicy:
        """The policy that `to_dict` described; messages name `where`."""
        if data.get("paceline_recompute") != FORMAT:
            raise SpecError(
                f"{where}: not a recomputation policy of format {FORMAT}; write one with"
                " `paceline analyze MODEL --memory --apply FILE`"
            )
        try:
            spans = tuple(
                RecomputeSpan(modules=_paths(span["modules"]), keep=_paths(span.get("keep", ())))
                for span in data.get("spans", ())
            )
            return RecomputePolicy(spans=spans, offload=_paths(data.get("offload", ())))
        except (KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                f"{where}: broken recomputation policy: {type(error).__name__} {error}; write it again with"
                " `paceline analyze MODEL --memory --apply FILE`"
            ) from None

    def save(self, path: Path | str) -> None:
        """Write as JSON; the file appears whole or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise SpecError(f"cannot write {str(path)!r}: {error.strerror}") from None

    @staticmethod
    def load(path: Path | str) -> RecomputePolicy:
        """Read what `save` wrote."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"cannot read policy {str(path)!r}: {error.strerror}") from None
        except ValueError as error:
            raise SpecError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise SpecError(f"{path}: expected a JSON object, got {type(data).__name__}")
        return RecomputePolicy.from_dict(data, str(path))


def _paths(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"expected a list of names, got {value!r}")
    names = tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"expected names, got {value!r}")
    return names


def _within(inner: Sequence[str], outer: Sequence[str]) -> bool:
    """Whether all modules of one span are among, or inside, those of the other."""
    return all(any(m == o or m.startswith(f"{o}.") for o in outer) for m in inner)


def _check_nesting(one: RecomputeSpan, other: RecomputeSpan) -> None:
    common = set(one.modules) & set(other.modules)
    for inner, outer in ((one, other), (other, one)):
        if inner.keep and _within(inner.modules, outer.modules):
            raise SpecError(
                f"a span of a recomputation policy that keeps results lies within another: {inner}, in"
                f" {outer}; they would be kept from the first run on"
            )
    if set(one.modules) == set(other.modules):
        raise SpecError(f"two spans of a recomputation policy are the same: {one}")
    nested = common in (set(one.modules), set(other.modules))
    if common and not nested:
        raise SpecError(
            f"spans of a recomputation policy overlap: {one}, and {other}; one may lie within another, or"
            " they have no module in common"
        )
