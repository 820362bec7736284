"""DecoderSpec: a decoder-only transformer as data. A family file makes it from a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from runtime.base.config import EngineConfig
from runtime.base.kv_cache_spec import (
    CHUNK,
    QUANTIZED_DTYPES,
    KVCacheSpec,
    KVGroupSpec,
    StateGroupSpec,
    groups_of_two_shapes,
    window_groups,
)
from runtime.base.model.experts_spec import ExpertsSpec as ExpertsSpec  # also for importers of this module, as below
from runtime.base.model.experts_spec import chooses_experts as chooses_experts
from runtime.base.model.experts_spec import of_router
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec, Linears, MixerSpec
from runtime.base.model.rope_spec import RopeSpec as RopeSpec
from runtime.base.shard import ALONE, Shard
from runtime.base.types import CallboardError

ACTIVATION_LIMIT = 7.0  # of swiglu_clamped
_ROPE = RopeSpec()

_MXFP4_UNIT = 64  # columns


class HeadShape(NamedTuple):
    """The shape of a layer's keys and values."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and kind of every part of one decoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec = _ROPE
    activation: Literal["silu", "gelu_tanh", "swiglu_clamped"] = "silu"  # of the gate
    activation_limit: float = 0.0  # swiglu_clamped: the largest gate, and the largest magnitude of up
    tied_head: bool = False
    makes_text: bool = True  # False if the checkpoint lacks an output head; the embedding then replaces it
    qk_norm: bool = False  # RMSNorm over head_dim of each q and k head, before RoPE
    qk_norm_all_heads: bool = False  # with qk_norm: over all heads of q at once, and over all of k
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    fused_qkv: bool = False  # the checkpoint has q, k and v as one tensor
    fused_gate_up: bool = False  # the checkpoint has gate and up as one tensor
    gated: bool = True  # the feed-forward layer has a gate; without it `up` alone is activated
    experts: ExpertsSpec | None = None
    dense_layers: int = 0  # with experts: the first layers that have a feed-forward layer instead
    dense_ffn_size: int = 0  # of these, or with `dense_beside`
    dense_beside: bool = False  # with experts: a feed-forward layer runs beside them, each with norms of its own
    norm: Literal["rms", "layer"] = "rms"  # layer: with the mean subtracted, and a bias
    pre_norms: bool = True  # a norm before attention and the feed-forward layer
    post_norms: bool = False  # a norm after each of them, before the residual
    learned_positions: bool = False  # an embedding of positions is added to that of tokens
    embed_scale: float = 1.0  # factor of the tokens' embedding, rounded to the model's dtype
    attn_scale: float | None = None  # factor of attention scores; None for head_dim ** -0.5
    attn_soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0 for none
    sinks: bool = False  # each query head has a logit that joins the softmax of its scores, without a value
    logit_scale: float = 1.0  # factor of the logits
    logit_soft_cap: float = 0.0  # as attn_soft_cap, for the scaled logits
    window: int = 0  # positions that a token of a sliding layer sees, itself included
    sliding: tuple[bool, ...] = ()  # True for each sliding layer; empty for none
    local_rope: RopeSpec | None = None  # of sliding layers; None if it equals `rope`
    no_rope: tuple[bool, ...] = ()  # True for each layer without rotary positions; empty for none
    full_head_dim: int = 0  # of layers without a window; 0 for head_dim
    full_kv_heads: int = 0  # likewise; 0 for num_kv_heads
    keys_as_values: bool = False  # layers without a window use k before its norm as v
    v_norm: bool = False  # with qk_norm: RMSNorm without a weight over head_dim of each v head
    shared_kv_layers: int = 0  # the last layers, which read k and v of the last layer of their kind before them
    shared_kv_ffn_size: int = 0  # of these; 0 for ffn_size
    layer_embed_size: int = 0  # width of an embedding of tokens that each layer has (Gemma 4); 0 for none
    layer_factors: bool = False  # the hidden states after a layer are multiplied by a factor of the layer
    output_gate: bool = False  # q's map also makes a gate; attention's output is multiplied by sigmoid(gate)
    mixer: MixerSpec | None = None  # of the layers in `stateful`, in place of attention
    stateful: tuple[bool, ...] = ()  # True for each layer with the mixer; empty for none
    latent: LatentSpec | None = None  # attention over latents in all layers; num_kv_heads is then 1

    # Schemes (runtime.quant.scheme) of the checkpoint's quantized parameters; None if all are dense.
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    fp8_kv_cache: bool = False  # the checkpoint requests keys and values in fp8
    shard: Shard = ALONE  # this spec holds the heads, ffn_size and vocab_size of this rank
    of_all_ranks: DecoderSpec | None = field(default=None, repr=False)  # the whole spec; None without ranks

    def __post_init__(self) -> None:
        if self.activation == "swiglu_clamped" and not (self.gated and self.activation_limit == ACTIVATION_LIMIT):
            raise CallboardError(
                f"The model's activation is clamped to {self.activation_limit}; only {ACTIVATION_LIMIT} is supported."
            )
        if self.ffn_bias and self.experts is not None and self.experts.shared > 1:
            raise CallboardError("The model's shared experts have biases; only one shared expert may have them.")

    @property
    def whole(self) -> DecoderSpec:
        """The spec of the whole model."""
        return self.of_all_ranks or self

    def first_kv_head(self, layer: int) -> int:
        """Return the index, in the whole model, of this rank's first K/V head of a layer. With fewer heads than ranks,
        neighbouring ranks share one."""
        return self.shard.rank * self.whole.heads(layer).num_kv_heads // self.shard.size

    @property
    def token_ids(self) -> range:
        """The token ids of this rank's rows of the embedding and the head, and of its logits."""
        return self.shard.vocabulary(self.whole.vocab_size)

    def of_rank(self, shard: Shard) -> DecoderSpec:
        """Return the spec of one rank of a tensor-parallel group. `self` is the spec of a whole model.

        Raises CallboardError if a group of that size cannot divide the model."""
        if shard.size == 1:
            return self
        if not self._is_divided_by(shard.size):
            sizes = [str(size) for size in range(1, self.num_heads + 1) if self._is_divided_by(size)]
            states = f", {self.mixer.key_heads} of states" if isinstance(self.mixer, DeltaRuleSpec) else ""
            raise CallboardError(
                f"tensor_parallel_size is {shard.size}, which does not divide the model's {self.num_heads} heads, "
                f"{self.num_kv_heads} of keys and values{states}, and feed-forward size of {self.ffn_size}; it can be "
                f"{', '.join(sizes)}."
            )
        return replace(
            self,
            num_heads=self.num_heads // shard.size,
            num_kv_heads=max(1, self.num_kv_heads // shard.size),
            full_kv_heads=self.full_kv_heads and max(1, self.full_kv_heads // shard.size),
            ffn_size=len(shard.inner(self.ffn_size, self.ffn_unit)),
            dense_ffn_size=self.dense_ffn_size // shard.size,
            shared_kv_ffn_size=self.shared_kv_ffn_size // shard.size,
            vocab_size=len(shard.vocabulary(self.vocab_size)),
            mixer=None if self.mixer is None else self.mixer.of_rank(shard.size),
            shard=shard,
            of_all_ranks=self,
        )

    def _is_divided_by(self, size: int) -> bool:
        kv_heads = {self.num_kv_heads, self.full_kv_heads or self.num_kv_heads}
        has_tokens = len(Shard(size - 1, size).vocabulary(self.vocab_size)) > 0
        divides_kv = all(heads % size == 0 or size % heads == 0 for heads in kv_heads)
        has_units = self.ffn_unit > 1 and self.ffn_size // self.ffn_unit >= size
        others = self.dense_ffn_size, self.shared_kv_ffn_size
        divides_ffn = (has_units or self.ffn_size % size == 0) and all(ffn % size == 0 for ffn in others)
        divides_states = self.mixer is None or self.mixer.is_divided_by(size)
        return self.num_heads % size == 0 and divides_kv and divides_ffn and divides_states and has_tokens

    @property
    def rope_head_dim(self) -> int:
        """The numbers of a head that the rotary table is for."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def ffn_unit(self) -> int:
        """The intermediate values of experts in mxfp4 that ranks do not divide; 1 for other experts.

        The 2,880 of gpt-oss divided by two would cut the 64 columns that kernels read together."""
        scheme = (self.quantization or {}).get(f"layers.{self.dense_layers}.experts.0.down.weight")
        is_mxfp4 = scheme is not None and (scheme.encoding, scheme.group_size) == ("fp4", 32) and not scheme.dequantized
        return _MXFP4_UNIT if is_mxfp4 and self.ffn_size % _MXFP4_UNIT == 0 else 1

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer has a mixture of experts."""
        return self.experts is not None and layer >= self.dense_layers

    @property
    def full_heads(self) -> HeadShape:
        """The shape of the keys and values of layers without a window."""
        return HeadShape(self.full_kv_heads or self.num_kv_heads, self.full_head_dim or self.head_dim)

    @property
    def has_two_shapes(self) -> bool:
        """True if sliding layers and full layers differ in the shape of their keys and values."""
        kinds = {self.heads(i) for i in range(self.num_layers) if not self.is_stateful(i)}
        return len(kinds) > 1

    def is_sliding(self, layer: int) -> bool:
        """Return True if a layer has a window."""
        return bool(self.sliding) and self.sliding[layer]

    def heads(self, layer: int) -> HeadShape:
        """Return the shape of a layer's keys and values."""
        return HeadShape(self.num_kv_heads, self.head_dim) if self.is_sliding(layer) else self.full_heads

    def shares_kv(self, layer: int) -> bool:
        """Return True if a layer reads the keys and values of an earlier layer."""
        return layer >= self.num_layers - self.shared_kv_layers

    def kv_layer(self, layer: int) -> int:
        """Return the layer that stores the keys and values of this layer."""
        if not self.shares_kv(layer):
            return layer
        own = range(self.num_layers - self.shared_kv_layers)
        return max(i for i in own if self.is_sliding(i) == self.is_sliding(layer))

    def rope_of(self, layer: int) -> RopeSpec:
        """Return a layer's rotary positions."""
        if self.no_rope and self.no_rope[layer]:
            return RopeSpec(partial=0.0)
        return self.local_rope if self.local_rope is not None and self.is_sliding(layer) else self.rope

    def ffn_size_of(self, layer: int) -> int:
        """Return the size of a layer's feed-forward layer, or of each of its experts."""
        if layer < self.dense_layers:
            return self.dense_ffn_size
        return self.shared_kv_ffn_size if self.shared_kv_ffn_size and self.shares_kv(layer) else self.ffn_size

    def linears(self, layer: int) -> Linears:
        """Return a layer's linear maps: fused name -> ({part: (out, in) shape}, has a bias), parts in row order.

        In a mixture, gate_up and down are the maps of each expert."""
        hidden = self.hidden_size
        ffn = self.ffn_size_of(layer)
        gate_up: dict[str, tuple[int, ...]] = {"gate": (ffn, hidden), "up": (ffn, hidden)}
        if self.fused_gate_up:
            gate_up = {"gate_up": (2 * ffn, hidden)}
        linears: Linears = self._mixer_linears(layer) | {
            "gate_up": (gate_up if self.gated else {"up": (ffn, hidden)}, self.ffn_bias),
            "down": ({"down": (hidden, ffn)}, self.ffn_bias),
        }
        if self.dense_beside:
            wide = self.dense_ffn_size
            linears["dense_gate_up"] = {"dense_gate": (wide, hidden), "dense_up": (wide, hidden)}, False
            linears["dense_down"] = {"dense_down": (hidden, wide)}, False
        if width := self.layer_embed_size:
            linears["layer_gate"] = {"layer_gate": (width, hidden)}, False
            linears["layer_out"] = {"layer_out": (hidden, width)}, False
        return linears

    def _mixer_linears(self, layer: int) -> Linears:
        """Return the maps around attention, or around the mixer in its place."""
        hidden, schemes = self.hidden_size, self.quantization or {}
        if self.mixer is not None and self.is_stateful(layer):
            return self.mixer.linears(hidden, lambda part: schemes.get(f"layers.{layer}.{part}.weight"))
        if self.latent is not None:
            return self.latent.linears(
                self.num_heads, hidden, lambda part: schemes.get(f"layers.{layer}.{part}.weight")
            )
        num_kv_heads, head_dim = self.heads(layer)
        q, kv = self.num_heads * head_dim, num_kv_heads * head_dim
        qkv: dict[str, tuple[int, ...]] = {"gated_q": (2 * q, hidden)} if self.output_gate else {"q": (q, hidden)}
        if not self.shares_kv(layer):
            qkv["k"] = kv, hidden
            if not self.keys_as_values or self.is_sliding(layer):
                qkv["v"] = kv, hidden
        if self.fused_qkv:
            qkv = {"qkv": (q + 2 * kv, hidden)}
        return {"qkv": (qkv, self.qkv_bias), "out": ({"out": (hidden, q)}, self.out_bias)}

    def reorders(self, name: str) -> bool:
        """Return True if loading permutes rows of this fused map (runtime.models.linear_maps.row_order)."""
        if name == "qkv":
            return self.rope.reorders_heads or self.output_gate
        return name in ("mix_in", "mix_gates") and isinstance(self.mixer, DeltaRuleSpec) and self.mixer.by_key_head

    def check(self, config: EngineConfig) -> None:
        """Raise CallboardError if `config` needs something that this model cannot do. Needs no weights."""
        self.whole.of_rank(Shard(0, config.tensor_parallel_size))
        if config.rank_invariant and config.max_loras:
            raise CallboardError(
                f"max_loras is {config.max_loras}; with rank_invariant it must be 0: adapters' sums have no leaves."
            )
        first = Shard(0, config.tensor_parallel_size).inner(self.whole.ffn_size, self.whole.ffn_unit)
        is_even = len(first) * config.tensor_parallel_size == self.whole.ffn_size
        if config.rank_invariant and config.quantization != "none" and not is_even:
            raise CallboardError(
                f"rank_invariant is on, for which {config.tensor_parallel_size} ranks need equal parts of experts in "
                f"mxfp4 with a size of {self.whole.ffn_size}; leave it off, or use quantization=none."
            )
        if config.rank_invariant and isinstance(self.mixer, DeltaRuleSpec) and self.mixer.tiled:
            raise CallboardError(
                "rank_invariant is on, for which the heads of states in this GGUF file have the wrong order; use a "
                "checkpoint of safetensors files."
            )
        if self.has_two_shapes and config.kv_layout == "contiguous":
            raise CallboardError(
                "kv_layout is contiguous, but this model's layers differ in the shape of their keys and values; use "
                "paged."
            )
        if self.latent is not None:
            self._check_latent(config)
        if self.mixer is not None and config.max_num_batched_tokens is not None and config.max_num_seqs is not None:
            least = CHUNK + config.max_num_seqs
            if config.chunked_prefill and config.max_num_batched_tokens < least:
                raise CallboardError(
                    f"max_num_batched_tokens is {config.max_num_batched_tokens}; for a model with recurrent states it "
                    f"must be at least {least}: max_num_seqs and {CHUNK} tokens of a prompt."
                )
        if config.max_model_len is not None and config.max_model_len > self.max_positions:
            raise CallboardError(
                f"max_model_len is {config.max_model_len}; the model's context is {self.max_positions} tokens at most."
            )

    def _check_latent(self, config: EngineConfig) -> None:
        if (form := self.kv_cache_form(config.kv_cache_dtype)) != "none":
            raise CallboardError(
                f"kv_cache_dtype is {form}; this model's cache has latents, which are stored in its dtype: use none."
            )
        if config.max_loras:
            raise CallboardError(
                f"max_loras is {config.max_loras}; it must be 0, since adapters are not supported for models with "
                "latent attention."
            )

    def kv_cache_form(self, kv_cache_dtype: str) -> str:
        """Return none, fp8 or int8: the meaning of the setting for this model."""
        if kv_cache_dtype == "auto":
            return "fp8" if self.fp8_kv_cache and self.latent is None else "none"
        return kv_cache_dtype

    def kv_cache(self, dtype: str, kv_cache_dtype: str = "auto", longest: int = 0) -> KVCacheSpec:
        """Return the KV cache of this model for a compute dtype such as "bfloat16".

        Sliding layers keep only their window if requests of up to `longest` tokens then need much less memory."""
        stored, scale_dtype = QUANTIZED_DTYPES.get(self.kv_cache_form(kv_cache_dtype), (dtype, None))
        layers = range(self.num_layers)
        attending = tuple(i for i in layers if not self.is_stateful(i) and not self.shares_kv(i))
        group = KVGroupSpec(attending, self.num_kv_heads, self.head_dim, stored, scale_dtype)
        if self.latent is not None:
            group = KVGroupSpec(attending, 1, self.latent.stored, stored, vectors=1)
        sliding = frozenset(i for i in attending if self.is_sliding(i))
        sources = tuple(map(self.kv_layer, layers)) if self.shared_kv_layers else ()
        if self.has_two_shapes:
            full = KVGroupSpec(tuple(i for i in attending if i not in sliding), *self.full_heads, stored, scale_dtype)
            window = self.window if self.window < longest else None
            limited = replace(group, layers=tuple(sorted(sliding)), window=window)
            return KVCacheSpec(groups_of_two_shapes(full, limited, longest or 1), sources=sources)
        groups = window_groups(group, sliding, self.window, longest) if sliding and longest else (group,)
        return KVCacheSpec(groups, self._states(dtype), sources)

    def is_stateful(self, layer: int) -> bool:
        """Return True if a layer has a state in place of keys and values."""
        return bool(self.stateful) and self.stateful[layer]

    def _states(self, dtype: str) -> StateGroupSpec | None:
        layers = tuple(i for i in range(self.num_layers) if self.is_stateful(i))
        if isinstance(self.mixer, DeltaRuleSpec):
            mixer = self.mixer
            return StateGroupSpec(layers, mixer.channels, dtype, mixer.value_heads, mixer.key_dim, mixer.value_dim)
        return None if self.mixer is None else StateGroupSpec(layers, self.mixer.channels, dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its unfused name, such as `layers.3.q.weight`."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)} | self._norm("final_norm")
        if self.learned_positions:
            shapes["positions"] = (self.max_positions, hidden)
        if not self.tied_head:
            shapes["head"] = (self.vocab_size, hidden)
        if width := self.layer_embed_size:
            shapes["layer_embed"] = (self.vocab_size, self.num_layers * width)
            shapes |= {"layer_embed_map.weight": (self.num_layers * width, hidden), "layer_embed_norm": (width,)}
        norms = ["attn_norm", "ffn_norm"] * self.pre_norms + ["post_attn_norm", "post_ffn_norm"] * self.post_norms
        norms += ["experts_norm", "post_dense_norm", "post_experts_norm"] * self.dense_beside
        norms += ["post_layer_norm"] * bool(self.layer_embed_size)
        for i in range(self.num_layers):
            for norm in norms:
                shapes |= self._norm(f"layers.{i}.{norm}")
            shapes |= {f"layers.{i}.{name}": shape for name, shape in self._mixer_parameters(i).items()}
            if self.experts and self.has_experts(i):
                shapes |= of_router(f"layers.{i}.", self.experts, hidden)
            if self.layer_factors:
                shapes[f"layers.{i}.factor"] = (1,)
            for name, (parts, has_bias) in self.linears(i).items():
                prefixes = [""]
                if self.experts and self.has_experts(i) and name in ("gate_up", "down"):
                    prefixes = [f"experts.{e}." for e in range(self.experts.all_experts)]
                for prefix in prefixes:
                    for part, shape in parts.items():
                        shapes[f"layers.{i}.{prefix}{part}.weight"] = shape
                        if has_bias:
                            shapes[f"layers.{i}.{prefix}{part}.bias"] = shape[:1]
        return shapes

    def _mixer_parameters(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what attention, or the mixer in its place, has beside its maps."""
        if self.mixer is not None and self.is_stateful(layer):
            return self.mixer.parameters()
        if self.latent is not None:
            return self.latent.parameters()
        sinks: dict[str, tuple[int, ...]] = {"sinks": (self.num_heads,)} if self.sinks else {}
        if self.qk_norm_all_heads:
            heads = {"q_heads_norm": self.num_heads, "k_heads_norm": self.num_kv_heads}
            return sinks | {name: (count * self.head_dim,) for name, count in heads.items()}
        norms = ["q_norm"] if self.shares_kv(layer) else ["q_norm", "k_norm"]
        return sinks | dict.fromkeys(norms, (self.heads(layer).head_dim,)) if self.qk_norm else sinks

    def _norm(self, name: str) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys([name, f"{name}_bias"] if self.norm == "layer" else [name], (self.hidden_size,))
