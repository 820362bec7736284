"""The decoder: one forward pass, assembled from a spec and written with the operations of runtime.kernels."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from runtime.core.types import CallboardError
from runtime.kernels import select
from runtime.kernels.attention import AttentionPlan
from runtime.kernels.linear import Linear
from runtime.kernels.rope import rope_table
from runtime.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

_MOST_DRAWN_ON_CPU = 1 << 28  # random weights


class Weights(Protocol):
    """What a decoder reads of a checkpoint (runtime.loading.checkpoint.Checkpoint)."""

    def names(self) -> Sequence[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a decoder computes; everything that its bits depend on beside the weights and the machine."""

    dtype: torch.dtype
    device: torch.device
    backend: Literal["torch", "triton"]
    packed: bool  # linear layers pre-packed for oneDNN
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights, fused: q, k and v are one linear map, gate and up another."""

    attn_norm: torch.Tensor
    q_norm: torch.Tensor | None  # [head_dim], with spec.qk_norm
    k_norm: torch.Tensor | None
    qkv: Linear
    out: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A decoder-only transformer with pre-norm blocks, rotary positions, grouped-query attention and a gated FFN."""

    def __init__(
        self,
        spec: DecoderSpec,
        numerics: Numerics,
        num_positions: int,  # of the rotary table
        read: Callable[[str], torch.Tensor],  # a parameter of `spec.shapes()` by name
    ) -> None:
        self.spec, self.numerics = spec, numerics
        self.kernels = select(numerics.backend, numerics.packed, numerics.deterministic, spec.activation)
        self.rope = rope_table(spec.rope, spec.head_dim, num_positions, numerics.dtype).to(numerics.device)
        self.embed = read("embed")
        self.layers = [self._layer(f"layers.{i}.", read) for i in range(spec.num_layers)]
        self.final_norm = read("final_norm")
        head = self.embed if spec.tied_head else read("head")
        self.head = self.kernels.linear(head, None)

    def _layer(self, prefix: str, read: Callable[[str], torch.Tensor]) -> Layer:
        linears = {}
        for name, (parts, has_bias) in self.spec.linears().items():
            weight = torch.cat([read(f"{prefix}{part}.weight") for part in parts])
            bias = torch.cat([read(f"{prefix}{part}.bias") for part in parts]) if has_bias else None
            linears[name] = self.kernels.linear(weight, bias)
        norms: dict[str, torch.Tensor | None] = {f"{n}_norm": read(f"{prefix}{n}_norm") for n in ("attn", "ffn")}
        for n in ("q_norm", "k_norm"):
            norms[n] = read(prefix + n) if self.spec.qk_norm else None
        return Layer(**norms, **linears)

    @classmethod
    def load(
        cls, checkpoint: Weights, spec: DecoderSpec, names: dict[str, str], numerics: Numerics, num_positions: int
    ) -> Decoder:
        """From a checkpoint whose tensor names are `names` (see llama.NAMES), checked before any is read."""
        sources = checkpoint_names(spec, names)
        check_tensors(checkpoint, spec, sources)
        read = lambda name: checkpoint.tensor(sources[name], numerics.dtype, numerics.device)  # noqa: E731
        start = time.perf_counter()
        decoder = cls(spec, numerics, num_positions, read)
        size = sum(math.prod(shape) for shape in spec.shapes().values()) * numerics.dtype.itemsize
        logger.info("weights: %.2f GiB read in %.1f s", size / (1 << 30), time.perf_counter() - start)
        return decoder

    @classmethod
    def dummy(cls, spec: DecoderSpec, numerics: Numerics, num_positions: int, seed: int = 0) -> Decoder:
        """Seeded random weights, scaled so that activations keep their size; for tests and benchmarks.

        Drawn on the CPU, the same for every device; large models on their own, as a CPU needs minutes for gigabytes."""
        shapes = spec.shapes()
        large = sum(math.prod(shape) for shape in shapes.values()) > _MOST_DRAWN_ON_CPU
        device = numerics.device if large else torch.device("cpu")
        generator = torch.Generator(device).manual_seed(seed)

        def read(name: str) -> torch.Tensor:
            return random_parameter(name, shapes[name], generator).to(numerics.device, numerics.dtype)

        return cls(spec, numerics, num_positions, read)

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        kv_index: torch.Tensor,  # [num_tokens] int64, where each token's k and v go: block * block_size + offset
        plan: AttentionPlan,
        caches: list[torch.Tensor],  # per layer, [2, num_kv_heads, num_blocks, block_size, head_dim]
    ) -> torch.Tensor:
        """[num_tokens, hidden] before the final norm; writes the tokens' keys and values."""
        spec, kernels = self.spec, self.kernels
        eps, heads = spec.norm_eps, (len(token_ids), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        rope = kernels.rope_rows(self.rope, positions)
        h = F.embedding(token_ids, self.embed)
        for layer, kv in zip(self.layers, caches, strict=True):
            qkv = layer.qkv.normed(h, layer.attn_norm, eps).view(heads)
            q = kernels.rope_store_kv(qkv, rope, kv, kv_index, layer.q_norm, layer.k_norm, eps)
            layer.out.add_to(h, kernels.attention(q, kv, plan))
            layer.down.add_to(h, layer.gate_up.gated(h, layer.ffn_norm, eps))
        return h

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] of `forward` -> [n, vocab]; in `out`, float32, if given (Triton backend)."""
        return self.head.logits(hidden, self.final_norm, self.spec.norm_eps, out)


def random_parameter(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A parameter of `spec.shapes()` in float32, drawn on the generator's device: norms are near 1."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    return noise.mul_(0.1).add_(1.0) if name.endswith("norm") else noise.mul_(shape[-1] ** -0.5)


def checkpoint_names(spec: DecoderSpec, names: dict[str, str]) -> dict[str, str]:
    """Every parameter of the spec -> its tensor in a checkpoint, from `names` (see llama.NAMES)."""
    sources = {}
    for parameter in spec.shapes():
        layer, part, suffix = re.fullmatch(r"(?:layers\.(\d+)\.)?(\w+)(\.weight|\.bias)?", parameter).groups("")
        sources[parameter] = names[part].format(layer) + suffix
    return sources


def check_tensors(checkpoint: Weights, spec: DecoderSpec, sources: dict[str, str]) -> None:
    """Raises CallboardError for the first tensor that is missing, has another shape, or has no place in the model."""
    present = set(checkpoint.names())
    for parameter, shape in spec.shapes().items():
        name = sources[parameter]
        if name not in present:
            raise CallboardError(f"The checkpoint lacks tensor {name}; its config asks for shape {list(shape)}.")
        if tuple(checkpoint.shape(name)) != shape:
            found = list(checkpoint.shape(name))
            raise CallboardError(f"Tensor {name} has shape {found}; the checkpoint's config asks for {list(shape)}.")
    # Old exports carry the rotary frequencies, and tied ones sometimes a copy of the embedding as head.
    extra = {name for name in present - set(sources.values()) if not name.endswith("rotary_emb.inv_freq")}
    if spec.tied_head:
        extra.discard("lm_head.weight")
    if extra:
        raise CallboardError(
            f"Tensor {min(extra)} of the checkpoint has no place in the model that its config describes."
        )
