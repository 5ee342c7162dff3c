"""A transformer by its sizes: what parallel plans need to know of it, and its parameter count.

Its plans are predicted and searched from these sizes; any other module is captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from paceline.errors import SpecError, UnknownSizes
from paceline.spec import checks
from paceline.spec.vocabulary import NormKind, Positions

#: what Megatron pads a vocabulary to, times the tensor-parallel degree
VOCABULARY_UNIT = 128
#: a published parameter count this near to one of ours was not rounded
EXACT = 2e-3


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A stack of equal layers between an embedding and a projection to the vocabulary."""

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    #: gated feed-forward (SwiGLU): three matrices in place of two
    gated: bool = False
    #: layer or rms
    norm: str = "layer"
    #: learned, rotary, alibi or none
    positions: str = "learned"
    #: learned positions there are; 0: as many as the sequence is long
    context: int = 0
    tied: bool = True
    causal: bool = True
    bias: bool = True
    #: experts of each layer, how many a token goes to, and the width of one that all tokens share (0: none)
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0
    #: experts are in every so many-th layer; the others have one feed-forward as wide as what a token meets
    #: in those
    moe_every: int = 1
    #: groups of experts that a token's are chosen from at most, so that it goes to few nodes (0: all)
    top_groups: int = 0
    #: latent attention (DeepSeek): queries, and keys with values, pass through these narrower widths;
    #: `rotary_dim` of a head's keys are shared by all heads and carry the positions
    q_rank: int = 0
    kv_rank: int = 0
    rotary_dim: int = 0
    #: the usual sequence length
    seq: int = 2048

    def __post_init__(self) -> None:
        checks.names("model", self)
        for field in ("layers", "hidden", "heads", "ffn", "vocab"):
            if getattr(self, field) < 1:
                raise SpecError(f"{self.name}: {field} must be at least 1, got {getattr(self, field)}")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise SpecError(
                f"{self.name}: {self.heads} heads are not a multiple of {self.kv_heads} key-value heads"
            )
        if self.experts and not 0 < self.top_k <= self.experts:
            raise SpecError(f"{self.name}: a token cannot go to {self.top_k} of {self.experts} experts")

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    # -- elements of tensors, in the order in which a forward pass uses them -----------------------

    def _linear(self, inputs: int, outputs: int) -> tuple[int, ...]:
        """Weights and biases of a fully connected layer."""
        return inputs * outputs, *[outputs] * self.bias

    def feed_tensors(self, width: int) -> tuple[int, ...]:
        """Of a feed-forward of so many hidden units."""
        ahead = self._linear(self.hidden, width) * (2 if self.gated else 1)
        return ahead + self._linear(width, self.hidden)

    @property
    def norm_tensors(self) -> tuple[int, ...]:
        """Of a norm: scales, and shifts where it has a mean."""
        return (self.hidden,) * (2 if self.norm == NormKind.LAYER else 1)

    @cached_property
    def attention_tensors(self) -> tuple[int, ...]:
        """One product makes queries, keys and values of classic models; those of latent attention are
        counted together.
        """
        if self.kv_rank:
            keys = self.heads * (self.head_dim + self.rotary_dim)
            down = self.hidden * (self.q_rank + self.kv_rank + self.rotary_dim)
            queries, values = self.q_rank * (keys + 1), self.kv_rank * (2 * self.q_size + 1)
            return (down + queries + values + self.q_size * self.hidden,)
        apart = (self.q_size, self.kv_size, self.kv_size)
        ahead = [self._linear(self.hidden, width) for width in (apart if self.gated else (sum(apart),))]
        return (*chain(*ahead), *self._linear(self.q_size, self.hidden))

    @cached_property
    def dense_feed_tensors(self) -> tuple[int, ...]:
        """Of a layer's feed-forward, or of what it has beside its experts: the router and what all share."""
        if not self.experts:
            return self.feed_tensors(self.ffn)
        return self.hidden * self.experts, *(self.feed_tensors(self.shared_ffn) if self.shared_ffn else ())

    @cached_property
    def layer_tensors(self) -> tuple[int, ...]:
        """Of a layer, experts left out."""
        norm = self.norm_tensors
        return norm + self.attention_tensors + norm + self.dense_feed_tensors

    # -- parameters --------------------------------------------------------------------------------

    @cached_property
    def expert_parameters(self) -> int:
        """Of all routed experts of a layer, on average over layers; these are what expert parallelism
        divides.
        """
        return self.experts * sum(self.feed_tensors(self.ffn)) // self.moe_every

    @cached_property
    def dense_parameters(self) -> int:
        """Of a layer, experts left out."""
        feed = sum(self.dense_feed_tensors)
        if self.moe_every > 1:  # the layers between
            between = sum(self.feed_tensors(self.dense_ffn))
            feed = (feed + (self.moe_every - 1) * between) // self.moe_every
        return sum(self.attention_tensors) + feed + 2 * sum(self.norm_tensors)

    @property
    def dense_ffn(self) -> int:
        """Width of the feed-forward of layers without experts."""
        return self.top_k * self.ffn + self.shared_ffn if self.experts else self.ffn

    @cached_property
    def layer_parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters

    @cached_property
    def embedding_parameters(self) -> int:
        """Tokens, positions, and what an encoder has besides (segments and a norm)."""
        learned = (self.context or self.seq) * self.hidden if self.positions == Positions.LEARNED else 0
        return (
            self.vocab * self.hidden
            + learned
            + (0 if self.causal else 2 * self.hidden + sum(self.norm_tensors))
        )

    @cached_property
    def head_parameters(self) -> int:
        """Last norm and projection, without a tied one; an encoder has a transformation and a bias in its
        place.
        """
        projection = 0 if self.tied else self.vocab * self.hidden
        encoder = 0 if self.causal else self.hidden * (self.hidden + 1) + self.vocab
        return sum(self.norm_tensors) + projection + encoder

    @cached_property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        idle = self.expert_parameters - self.top_k * sum(self.feed_tensors(self.ffn)) // self.moe_every
        return self.parameters - self.layers * idle if self.experts else self.parameters

    def padded_vocab(self, tp: int, unit: int = VOCABULARY_UNIT) -> int:
        """The vocabulary made divisible by the tensor-parallel degree, as Megatron does."""
        whole = unit * tp
        return -(-self.vocab // whole) * whole

    def flops(self, tokens: float, seq: int, trained: bool = True) -> float:
        """Model FLOPs of one training step over `tokens`: forward and backward, no recomputation.

        Causal attention counts by half. A product with weights is done once forward, and twice backward: for
        the gradients of its input and (where the weights are `trained`) of its weights.
        """
        routed = self.top_k * sum(self.feed_tensors(self.ffn)) if self.experts else 0
        products = sum(self.attention_tensors) + sum(self.dense_feed_tensors) + routed
        weights = self.layers * products + self.vocab * self.hidden
        scores = self.layers * 2 * self.q_size * seq * (0.5 if self.causal else 1.0)
        return 2.0 * tokens * ((3 if trained else 2) * weights + 3 * scores)


#: Hugging Face's names for a size, first found wins
_HF = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
}
#: model types with layer norms, biases and learned positions; the others are Llama's kind
_CLASSIC = ("gpt2", "gpt_neo", "opt", "bert", "roberta", "gpt_bigcode", "bloom", "mpt")
#: what older configurations leave to the class: head tied to the embedding
_TIED = (*_CLASSIC, "gemma", "gemma2")


#: tokens of a sample where the user does not say, unless a model takes fewer
USUAL_SEQ = 4096
#: layers that are known by their sizes; others (mamba, linear_attention) are not
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


def usual_seq(config: Mapping[str, Any]) -> int:
    """Tokens of a sample by default: 4,096, or the most that the model takes if that is less."""
    limits = [int(config[key]) for key in _HF["context"] if config.get(key)]
    return min([USUAL_SEQ, *limits])


def from_hf(config: Mapping[str, Any], name: str = "") -> Transformer:
    """The transformer of a Hugging Face `config.json`; UnknownSizes where only a capture describes it."""
    kind = str(config.get("model_type", ""))
    found = _not_a_stack(config)
    if found:
        raise UnknownSizes(f"{name or kind or 'config.json'}: {found}; not a transformer known by its sizes")
    sizes = {field: int(_first(config, keys) or 0) for field, keys in _HF.items()}
    classic = kind in _CLASSIC
    if not sizes["ffn"]:
        sizes["ffn"] = int(config.get("expansion_ratio", 4)) * sizes["hidden"]
    usual = "learned" if classic else "rotary"
    positions = "alibi" if kind in ("bloom", "mpt") else usual
    return Transformer(
        name=name or kind or "transformer",
        **sizes,
        gated=not classic,
        norm="layer" if classic else "rms",
        positions=positions,
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        causal=kind not in ("bert", "roberta"),
        bias=classic and kind != "mpt",
        seq=usual_seq(config),
    )


def _not_a_stack(config: Mapping[str, Any]) -> str:
    """What keeps a configuration from being a stack of equal transformer layers; empty where nothing does."""
    if config.get("kv_lora_rank"):
        return "latent attention (kv_lora_rank)"
    if config.get("is_encoder_decoder"):
        return "an encoder and a decoder"
    others = [kind for kind in config.get("layer_types") or () if kind not in _ATTENTION_LAYERS]
    state_space = [key for key in config if key.startswith(("mamba_", "ssm_", "linear_num_"))]
    if others or state_space:
        return f"layers that are not attention ({(others or state_space)[0]})"
    for field in ("layers", "hidden", "heads", "vocab"):
        if not isinstance(_first(config, _HF[field]), int):
            return f"no {' or '.join(_HF[field])}"
    return ""


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key)), None)


def from_columns(row: Mapping[str, str]) -> Transformer:
    """The transformer of a table's columns (n_layers, hidden, heads, kv_heads, ffn_hidden, vocab, seq_len,
    params).

    Tables give sizes, not kinds. A feed-forward four times as wide as the model is the classic one and any
    other a gated one; what else may differ is what brings the count nearest to `params`.
    """
    missing = [column for column in ("n_layers", "hidden", "heads", "vocab") if not row.get(column)]
    if missing:
        raise SpecError(f"the row gives no {', '.join(missing)}")
    hidden, heads = int(float(row["hidden"])), int(float(row["heads"]))
    ffn = int(float(row.get("ffn_hidden") or 4 * hidden))
    classic = ffn == 4 * hidden
    kv_heads = int(float(row.get("kv_heads") or heads))
    rotary = not classic or kv_heads < heads
    # what else may differ: biases, learned positions or none, a tied head; first what is usual for the kind
    kinds = (
        [(False, "rotary", tied) for tied in (False, True)]
        if rotary
        else [
            (bias, positions, tied)
            for tied in (True, False)
            for bias in (True, False)
            for positions in ("learned", "alibi")
        ]
    )
    candidates = [
        Transformer(
            name=row.get("model", "transformer"),
            layers=int(float(row["n_layers"])),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            vocab=int(float(row["vocab"])),
            gated=not classic,
            norm="layer" if classic else "rms",
            positions=positions,
            tied=tied,
            bias=bias,
            seq=int(float(row.get("seq_len") or 2048)),
        )
        for bias, positions, tied in kinds
    ]
    published = float(row.get("params") or 0)
    best = min(candidates, key=lambda t: abs(t.parameters - published))
    if not published:
        return candidates[0]
    if abs(best.parameters / published - 1) < EXACT:
        return best
    # a rounded count says nothing about biases and positions
    plain = (candidates[0], candidates[-1] if rotary else candidates[4])
    return min(plain, key=lambda t: abs(t.parameters - published))
