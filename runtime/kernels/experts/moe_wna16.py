"""Mixtures of experts with 16-bit activations and quantized weights, which stay quantized in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.choice_tiles import ExpertTiles, Tile, tiled
from runtime.kernels.experts.moe_routing import MOST_SINGLE, RoutedExperts, stacked
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.experts.moe_wna16_product import moe_wna16_products
from runtime.kernels.experts.moe_wna16_words import STEP, in_tile_order, with_word_scales
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.triton_language import INTERPRETED


class QuantizedExperts(RoutedExperts):
    """`GroupedExperts` with quantized weights and 16-bit activations.

    Weights are in the order of `moe_wna16_words`. Few choices take five launches: norm, router, routing and two
    products. The second adds a token's results. Others take six: norm, router, routing, tiles, both products, and the
    sum of a token's results."""

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Router,
        weights: Iterable[tuple[QuantizedWeight, QuantizedWeight]],
        activation: Activation,
        deterministic: bool,
    ) -> None:
        self.spec, self.router, self.activation, self.deterministic = spec, router, activation, deterministic
        pairs: list[tuple[QuantizedWeight, ...]] = []  # the last pair that was read

        def tensors() -> Iterator[list[list[torch.Tensor]]]:
            for pairs[:] in ([tuple(map(in_tile_order, pair))] for pair in weights):
                yield [[t for t in (w.values, w.scales, w.zero_points) if t is not None] for w in pairs[0]]

        stacks = stacked(tensors(), spec.all_experts)
        self.weights = [
            with_word_scales(replace(weight, values=values, scales=scales, zero_points=more[0] if more else None))
            for weight, (values, scales, *more) in zip(pairs[0], stacks, strict=True)
        ]

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        out = residual if out is None else out
        x = self.router.logits.norm(residual, norm_weight, eps)
        (num_tokens, hidden), num_choices = x.shape, len(x) * self.spec.choices
        num_experts = self.spec.all_experts
        most = min(MOST_SINGLE, SINGLE_PROGRAMS * SINGLE_TILE.block_n // self.weights[0].shape[0])
        is_single = self._is_single(num_tokens, hidden, SINGLE_TILE.block_n, most)
        tile = SINGLE_TILE if is_single else moe_wna16_tile(num_choices, num_experts, self.deterministic)
        ids, weights = self._route(self.router.logits_of(residual, x, eps))
        tiles = ExpertTiles(ids) if is_single else tiled(ids, num_experts, tile.block_m)
        results = x.new_empty(num_choices, hidden, dtype=torch.float32 if is_single else x.dtype)
        moe_wna16_products(
            x, self.weights, self.biases, results, tiles, weights, out, self.spec.choices, tile, self.activation
        )
        if not is_single:
            self._combine(results, weights, out)


# For choices with their own programs: warps divide K. With more programs in the first product, tiles are faster.
SINGLE_TILE = Tile(8, 32, STEP, 2, 2)
SINGLE_PROGRAMS = 1500


def moe_wna16_tile(num_choices: int, num_experts: int, deterministic: bool) -> Tile:
    """A tile holds the choices of most experts.

    One or two warps multiply with mma.sync, which does not wait for upcasts, and which gives a row the same bits in any
    tile. Deterministic mode therefore has no other tiles. Elsewhere, many choices use wgmma."""
    # Under the interpreter, numpy's sums depend on the tile size.
    mean = 32.0 if INTERPRETED and deterministic else num_choices / num_experts
    if mean <= 2:
        return Tile(8, 64, STEP, 2, 3)
    if mean <= 4:
        return Tile(8, 64, STEP, 2, 5)
    if mean <= 12:
        return Tile(16, 64, STEP, 2, 3)
    return Tile(32, 64, STEP, 2, 4) if mean <= 40 or deterministic else Tile(128, 128, STEP, 8, 2)
