"""DecoderSpec: a decoder-only transformer as data. A family file makes it from a checkpoint's config."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from runtime.base.config import EngineConfig
from runtime.base.kv_cache_spec import CHUNK, QUANTIZED_DTYPES, KVCacheSpec, KVGroupSpec, StateGroupSpec
from runtime.base.model.attention_spec import AttentionSpec as AttentionSpec  # also for importers of this module
from runtime.base.model.attention_spec import CachedShape
from runtime.base.model.experts_spec import ExpertsSpec as ExpertsSpec
from runtime.base.model.experts_spec import chooses_experts as chooses_experts
from runtime.base.model.kv_groups import groups_of_shapes, window_groups
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.model.layer_spec import ACTIVATION_LIMIT as ACTIVATION_LIMIT
from runtime.base.model.layer_spec import FfnSpec as FfnSpec
from runtime.base.model.layer_spec import LayerSpec as LayerSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec, Linears, ShortConvSpec
from runtime.base.model.rope_spec import RopeSpec as RopeSpec
from runtime.base.shard import ALONE, Shard
from runtime.base.types import CallboardError

_MXFP4_UNIT = 64  # columns


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The layers of one decoder, its embeddings and its head."""

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"  # layer: with the mean subtracted, and a bias
    learned_positions: bool = False  # a position embedding is added to the token embedding
    embed_scale: float = 1.0  # the token embedding's factor, rounded to the model's dtype
    tied_head: bool = False
    makes_text: bool = True  # False if the checkpoint lacks an output head; the embedding then replaces it
    logit_scale: float = 1.0  # factor of the logits
    logit_soft_cap: float = 0.0  # scaled logits become cap * tanh(logit / cap); 0 for none

    draft_layers: tuple[LayerSpec, ...] = ()  # a head's, which follow in the KV cache (head_spec.py)

    # Schemes (runtime.quant.scheme) for the checkpoint's quantized parameters; None if all are dense.
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    fp8_kv_cache: bool = False  # the checkpoint requests keys and values in fp8
    shard: Shard = ALONE  # this spec holds this rank's layer shares and vocab_size
    of_all_ranks: DecoderSpec | None = field(default=None, repr=False)  # the whole spec; None without ranks

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def attentions(self) -> dict[int, AttentionSpec | LatentSpec]:
        """The mixers with keys and values, by their layer."""
        return _attentions(self.layers)

    @property
    def rope_has_sections(self) -> bool:
        """True if tokens have a rotary position by frame, row and column (M-RoPE)."""
        return any(mixer.rope.sections for mixer in self.attentions.values())

    @property
    def whole_images(self) -> bool:
        """True if an image's tokens see each other in some layer, so that no row ends within one."""
        return any(isinstance(mixer, AttentionSpec) and mixer.whole_images for mixer in self.attentions.values())

    @property
    def num_heads(self) -> int:
        """The most heads of a layer's attention."""
        return max(layer.mixer.num_heads for layer in self.layers)

    @property
    def latent(self) -> LatentSpec | None:
        """The first attention over latents; None without one."""
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, LatentSpec)), None)

    @property
    def states(self) -> DeltaRuleSpec | ShortConvSpec | None:
        """The mixer of layers with a state; None without such layers."""
        mixers = (layer.mixer for layer in self.layers)
        return next((mixer for mixer in mixers if isinstance(mixer, DeltaRuleSpec | ShortConvSpec)), None)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The first mixture of experts; None without one."""
        return self.ffn.experts

    @property
    def ffn(self) -> FfnSpec:
        """The first mixture, or the first feed-forward layer. The activation and the gate of all layers are equal."""
        return next((layer.ffn for layer in self.layers if layer.ffn.experts is not None), self.layers[0].ffn)

    @property
    def layer_embed_size(self) -> int:
        """The width of each layer's own token embedding; 0 for none."""
        return self.layers[0].embed_size

    @property
    def whole(self) -> DecoderSpec:
        """The spec of the whole model."""
        return self.of_all_ranks or self

    def first_kv_head(self, layer: int) -> int:
        """Return the index, in the whole model, of this rank's first K/V head in a layer. With fewer heads than ranks,
        neighbouring ranks share one."""
        return self.shard.rank * self.whole.layers[layer].mixer.num_kv_heads // self.shard.size

    @property
    def token_ids(self) -> range:
        """The token ids in this rank's embedding rows, head rows and logits."""
        return self.shard.vocabulary(self.whole.vocab_size)

    def of_rank(self, shard: Shard) -> DecoderSpec:
        """Return the spec for one rank in a tensor-parallel group. `self` is a whole model's spec.

        Raises CallboardError if a group with that size cannot divide the model."""
        if shard.size == 1:
            return self
        if not self._is_divided_by(shard.size):
            sizes = [str(size) for size in range(1, self.num_heads + 1) if self._is_divided_by(size)]
            states = f", {self.states.key_heads} of states" if isinstance(self.states, DeltaRuleSpec) else ""
            num_kv_heads = max(layer.mixer.num_kv_heads for layer in self.layers)
            raise CallboardError(
                f"tensor_parallel_size is {shard.size}, which does not divide the model's {self.num_heads} heads, "
                f"{num_kv_heads} of keys and values{states}, and feed-forward size of {self.ffn.size}; it can be "
                f"{', '.join(sizes)}."
            )
        return replace(
            self,
            layers=tuple(layer.of_rank(shard, self.ffn_unit(i)) for i, layer in enumerate(self.layers)),
            draft_layers=tuple(layer.of_rank(shard, 1) for layer in self.draft_layers),
            vocab_size=len(shard.vocabulary(self.vocab_size)),
            shard=shard,
            of_all_ranks=self,
        )

    def _is_divided_by(self, size: int) -> bool:
        has_tokens = len(Shard(size - 1, size).vocabulary(self.vocab_size)) > 0
        return has_tokens and all(layer.is_divided_by(size, self.ffn_unit(i)) for i, layer in enumerate(self.layers))

    def ffn_unit(self, layer: int) -> int:
        """Return the experts' intermediate values in mxfp4 that ranks do not divide; 1 for other layers.

        gpt-oss's 2,880 divided by two would cut the 64 columns that kernels read together."""
        scheme = (self.quantization or {}).get(f"layers.{layer}.experts.0.down.weight")
        is_mxfp4 = scheme is not None and (scheme.encoding, scheme.group_size) == ("fp4", 32) and not scheme.dequantized
        return _MXFP4_UNIT if is_mxfp4 and self.layers[layer].ffn.size % _MXFP4_UNIT == 0 else 1

    def linears(self, layer: int) -> Linears:
        """Return a layer's linear maps: fused name -> ({part: (out, in) shape}, has a bias), parts in row order."""
        schemes = self.quantization or {}
        return self.layers[layer].linears(self.hidden_size, lambda part: schemes.get(f"layers.{layer}.{part}.weight"))

    def adapted_linears(self, layer: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """A layer's fused maps that may have adapters, with their parts' (out, in) shapes. Experts' maps may not."""
        expert_maps = ("gate_up", "down") if self.layers[layer].ffn.experts else ()
        return {name: parts for name, (parts, _) in self.linears(layer).items() if name not in expert_maps}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its unfused name, such as `layers.3.q.weight`."""
        hidden, has_norm_bias = self.hidden_size, self.norm == "layer"
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden), "final_norm": (hidden,)}
        if has_norm_bias:
            shapes["final_norm_bias"] = (hidden,)
        if self.learned_positions:
            shapes["positions"] = (self.max_positions, hidden)
        if not self.tied_head:
            shapes["head"] = (self.vocab_size, hidden)
        if width := self.layer_embed_size:
            shapes["layer_embed"] = (self.vocab_size, self.num_layers * width)
            shapes |= {"layer_embed_map.weight": (self.num_layers * width, hidden), "layer_embed_norm": (width,)}
        for i, layer in enumerate(self.layers):
            own = layer.shapes(hidden, has_norm_bias, self.linears(i))
            shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
        return shapes

    def check(self, config: EngineConfig) -> None:
        """Raise CallboardError if `config` needs something that this model cannot do. Needs no weights."""
        self.whole.of_rank(Shard(0, config.tensor_parallel_size))
        if config.rank_invariant:
            self._check_leaves(config)
        if len(self._cached_shapes) > 1 and config.kv_layout == "contiguous":
            raise CallboardError(
                "kv_layout is contiguous, but this model's layers differ in the shape of their keys and values; use "
                "paged."
            )
        if self.latent is not None:
            self._check_latent(config)
        if self.states is not None and config.max_num_batched_tokens is not None and config.max_num_seqs is not None:
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

    def _check_leaves(self, config: EngineConfig) -> None:
        if config.max_loras:
            raise CallboardError(
                f"max_loras is {config.max_loras}; with rank_invariant it must be 0: adapters' sums have no leaves."
            )
        first, layers = Shard(0, config.tensor_parallel_size), enumerate(self.whole.layers)
        parts = [(layer.ffn.size, len(first.inner(layer.ffn.size, self.whole.ffn_unit(i)))) for i, layer in layers]
        size = next((size for size, part in parts if part * first.size != size), 0)
        if config.quantization != "none" and size:
            raise CallboardError(
                f"rank_invariant is on, for which {config.tensor_parallel_size} ranks need equal parts of experts in "
                f"mxfp4 with a size of {size}; leave it off, or use quantization=none."
            )
        if isinstance(self.states, DeltaRuleSpec) and self.states.tiled:
            raise CallboardError(
                "rank_invariant is on, for which the heads of states in this GGUF file have the wrong order; use a "
                "checkpoint of safetensors files."
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
        """Return this model's KV cache for a compute dtype such as "bfloat16".

        Sliding layers keep only their window if requests up to `longest` tokens then need much less memory."""
        stored, scale_dtype = QUANTIZED_DTYPES.get(self.kv_cache_form(kv_cache_dtype), (dtype, None))
        parts = defaultdict[tuple[CachedShape, bool, int | None], list[int]](list)
        sources = list(range(self.num_layers + len(self.draft_layers)))
        for i, mixer in _attentions(self.layers + self.draft_layers).items():
            if mixer.kv_source is not None:
                sources[i] = mixer.kv_source
            else:
                window = mixer.window if 0 < mixer.window < longest else None
                parts[mixer.cached, mixer.window > 0, window].append(i)
        groups = [
            KVGroupSpec(tuple(layers), *shape[:2], stored, scale_dtype, window, shape.vectors)
            for (shape, _, window), layers in sorted(parts.items(), key=lambda part: part[0][1])
        ]
        if len(self._cached_shapes) == 1 and len({group.window for group in groups} - {None}) < 2:
            divided = window_groups(groups, longest)
        else:
            divided = groups_of_shapes(groups, longest or 1)
        has_shared = sources != list(range(len(sources)))
        return KVCacheSpec(divided, self._states(dtype), tuple(sources) if has_shared else ())

    @property
    def _cached_shapes(self) -> set[CachedShape]:
        return {mixer.cached for mixer in _attentions(self.layers + self.draft_layers).values()}

    def _states(self, dtype: str) -> StateGroupSpec | None:
        layers = tuple(i for i in range(self.num_layers) if i not in self.attentions)
        return None if self.states is None else self.states.state(layers, dtype)


def _attentions(layers: tuple[LayerSpec, ...]) -> dict[int, AttentionSpec | LatentSpec]:
    mixers = ((i, layer.mixer) for i, layer in enumerate(layers))
    return {i: mixer for i, mixer in mixers if isinstance(mixer, AttentionSpec | LatentSpec)}
