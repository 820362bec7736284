"""The decoder: one forward pass, assembled from a spec and written with the operations of runtime.kernels."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from runtime.core.decoder_spec import DecoderSpec
from runtime.kernels import select
from runtime.kernels.attention import AttentionPlan
from runtime.kernels.experts import Experts, GroupedExperts
from runtime.kernels.linear import Linear
from runtime.kernels.rope import rope_table
from runtime.models.weight_map import Tensors, WeightMap

logger = logging.getLogger(__name__)

_MOST_DRAWN_ON_CPU = 1 << 28  # random weights


class Weights(Tensors, Protocol):
    """What a decoder reads of a checkpoint (runtime.loading.checkpoint.Checkpoint)."""

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

    attn_norm: torch.Tensor  # [hidden]; a layer norm's with its bias, [2, hidden]
    post_attn_norm: torch.Tensor | None  # with spec.post_norms
    q_norm: torch.Tensor | None  # [head_dim], with spec.qk_norm
    k_norm: torch.Tensor | None
    qkv: Linear
    rope: int  # which of the rotary tables
    attention: Callable  # (q, kv, plan), with the layer's scale, window and soft cap
    out: Linear
    ffn_norm: torch.Tensor
    post_ffn_norm: torch.Tensor | None
    gate_up: Linear | None  # and down: without spec.experts
    down: Linear | None
    experts: Experts | GroupedExperts | None


class Decoder:
    """A decoder-only transformer with pre-norm blocks and grouped-query attention, as its spec says."""

    def __init__(
        self,
        spec: DecoderSpec,
        numerics: Numerics,
        num_positions: int,  # that a request may have
        read: Callable[[str], torch.Tensor],  # a parameter of `spec.shapes()` by name
    ) -> None:
        self.spec, self.numerics, self.num_positions = spec, numerics, num_positions
        self.kernels = select(numerics.backend, numerics.packed, numerics.deterministic, spec)
        table = partial(rope_table, head_dim=spec.head_dim, num_positions=num_positions, dtype=numerics.dtype)
        ropes = (spec.rope,) if spec.local_rope is None else (spec.rope, spec.local_rope)
        self.ropes = [table(rope).to(numerics.device) for rope in ropes]
        self.embed = read("embed")
        self.embed_scale = float(torch.tensor(spec.embed_scale, dtype=numerics.dtype))
        self.position_embed = read("positions") if spec.learned_positions else None
        self.layers = [self._layer(i, read) for i in range(spec.num_layers)]
        self.final_norm = self._norm("final_norm", read)
        self.head = self.kernels.linear(self.embed if spec.tied_head else read("head"), None)

    def _layer(self, index: int, read: Callable[[str], torch.Tensor]) -> Layer:
        spec, prefix = self.spec, f"layers.{index}."
        sliding = bool(spec.sliding) and spec.sliding[index]
        norms: dict[str, torch.Tensor | None] = {n: self._norm(prefix + n, read) for n in ("attn_norm", "ffn_norm")}
        for n in ("post_attn_norm", "post_ffn_norm"):
            norms[n] = self._norm(prefix + n, read) if spec.post_norms else None
        for n in ("q_norm", "k_norm"):
            norms[n] = read(prefix + n)[rope_permutation(spec)] if spec.qk_norm else None
        dense = spec.experts is None
        linears = {
            name: self.kernels.linear(*self._weights(prefix, name, read)) if dense or name in ("qkv", "out") else None
            for name in spec.linears()
        }
        attention = partial(
            self.kernels.attention,
            scale=spec.head_dim**-0.5 if spec.attn_scale is None else spec.attn_scale,
            window=spec.window if sliding and spec.window < self.num_positions else 0,
            soft_cap=spec.attn_soft_cap,
        )
        rope = int(sliding and spec.local_rope is not None)
        experts = None if dense else self._experts(prefix, read)
        return Layer(**norms, **linears, rope=rope, attention=attention, experts=experts)

    def _experts(self, prefix: str, read: Callable[[str], torch.Tensor]) -> Experts | GroupedExperts:
        spec = self.spec.experts
        router = self.kernels.linear(read(f"{prefix}router.weight"), None)
        weights = (
            [self._weights(f"{prefix}experts.{e}.", name, read)[0] for name in ("gate_up", "down")]
            for e in range(spec.num_experts)
        )
        return self.kernels.experts(spec, router.product, weights)

    def _weights(
        self, prefix: str, name: str, read: Callable[[str], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of a fused linear map."""
        parts, has_bias = self.spec.linears()[name]
        joined = []
        for suffix in ("weight", "bias") if has_bias else ("weight",):
            rows = [read(f"{prefix}{part}.{suffix}") for part in parts]
            fused = rows[0] if len(rows) == 1 else torch.cat(rows)
            if name == "qkv" and self.spec.rope.partial not in (0.0, 1.0):
                heads = fused.view(-1, self.spec.head_dim, *fused.shape[1:])
                turned = heads[: self.spec.num_heads + self.spec.num_kv_heads]
                turned.copy_(turned[:, rope_permutation(self.spec)])
            joined.append(fused)
        return joined[0], joined[1] if has_bias else None

    def _norm(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        return read(name) if self.spec.norm == "rms" else torch.stack((read(name), read(f"{name}_bias")))

    @classmethod
    def load(
        cls, checkpoint: Weights, spec: DecoderSpec, weight_map: WeightMap, numerics: Numerics, num_positions: int
    ) -> Decoder:
        """From a checkpoint with the tensors of the weight map, whose tensors are all checked before any is read."""
        sources = weight_map.find(spec, checkpoint)

        def read(parameter: str) -> torch.Tensor:
            name, device = sources[parameter], numerics.device
            if weight_map.norms_plus_one and parameter.endswith("norm"):  # in fp32: 1 + w has more digits than w
                return checkpoint.tensor(name, torch.float32, device).add_(1.0)
            tensor = checkpoint.tensor(name, numerics.dtype, device)
            return tensor.t().contiguous() if weight_map.transposed and parameter.endswith(".weight") else tensor

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
        ropes = [kernels.rope_rows(table, positions) for table in self.ropes]
        h = F.embedding(token_ids, self.embed)
        if self.embed_scale != 1.0:
            h.mul_(self.embed_scale)
        if self.position_embed is not None:
            h.add_(F.embedding(positions, self.position_embed))
        for layer, kv in zip(self.layers, caches, strict=True):
            qkv = layer.qkv.normed(h, layer.attn_norm, eps).view(heads)
            q = kernels.rope_store_kv(qkv, ropes[layer.rope], kv, kv_index, layer.q_norm, layer.k_norm, eps)
            layer.out.add_to(h, layer.attention(q, kv, plan), layer.post_attn_norm, eps)
            if layer.experts is None:
                layer.down.add_to(h, layer.gate_up.gated(h, layer.ffn_norm, eps), layer.post_ffn_norm, eps)
            else:
                layer.experts.add_to(h, kernels.norm(h, layer.ffn_norm, eps))
        return h

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] of `forward` -> [n, vocab]; in `out`, float32, if given (Triton backend)."""
        logits, cap = self.head.logits(hidden, self.final_norm, self.spec.norm_eps, out), self.spec.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def rope_permutation(spec: DecoderSpec) -> torch.Tensor:
    """[head_dim]: the dimensions of a head such that i turns with i + head_dim / 2 (see rope_table).

    Checkpoints in which only the first ones turn pair those among themselves; q and k may be reordered alike."""
    dims, turning = torch.arange(spec.head_dim), int(spec.head_dim * spec.rope.partial)
    halves = zip(dims[:turning].tensor_split(2), dims[turning:].tensor_split(2), strict=True)
    return torch.cat([part for half in halves for part in half])


def random_parameter(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A parameter of `spec.shapes()` in float32, drawn on the generator's device: norms are near 1."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    return noise.mul_(0.1).add_(1.0) if name.endswith("norm") else noise.mul_(shape[-1] ** -0.5)
