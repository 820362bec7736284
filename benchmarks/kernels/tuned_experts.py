"""Mixtures of experts, which the tuner takes as a whole: their layers and their candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.random_weights import FORMS, random_weight
from benchmarks.kernels.tuning import Cell, Choices, Operation
from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts import moe_few_w16a16, moe_fp8_w8a8, moe_wna16
from runtime.kernels.experts.choice_tiles import Tile
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.experts.moe_w16a16 import GroupedExperts
from runtime.kernels.experts.moe_wna16_words import STEP
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.skinny_gemm_configs import SkinnyGemmConfig
from runtime.kernels.quantized.fp8_w8a8_gemm import fits_fp8_gemm
from runtime.kernels.quantized.quantized_weight import dequantize_torch
from runtime.kernels.triton_language import INTERPRETED


@contextmanager
def _with(module: ModuleType, values: dict[str, Any]) -> Iterator[None]:
    """Give constants of a module other values."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class _Rule(NamedTuple):
    """A rule that always gives this tile."""

    tile: Tile

    def __call__(self, *_: object) -> Tile:
        return self.tile


class Mixture(NamedTuple):
    hidden: int
    ffn: int
    experts: int
    chosen: int
    shared: int = 0


MIXTURES = {
    "qwen3-30b-a3b": Mixture(2048, 768, 128, 8),
    "gpt-oss-20b": Mixture(2880, 2880, 32, 4),
    "gpt-oss-120b": Mixture(2880, 2880, 128, 4),
    "glm-4.5-air": Mixture(4096, 1408, 128, 8),
    "glm-4.7-flash": Mixture(2048, 1536, 64, 4, 1),
    "tiny": Mixture(128, 128, 4, 2),
}


class ExpertLayers:
    """Norm, router, routing and both products of some layers."""

    num_layers = 1 if INTERPRETED else 4

    def __init__(self, cell: Cell, device: str) -> None:
        shape, self._dtype = MIXTURES[cell.shape], torch.float32 if INTERPRETED else torch.bfloat16
        self._spec = ExpertsSpec(shape.experts, shape.chosen, True, shape.shared)
        self._sizes = (2 * shape.ffn, shape.hidden), (shape.hidden, shape.ffn)
        self._form, self._device = cell.form, device
        probe = None if cell.form == "bf16" else tuple(random_weight(cell.form, *s, "meta") for s in self._sizes)
        is_fp8 = cell.form == "fp8" and all(
            fits_fp8_gemm("fp8", w.shape, w.group_size, w.scale_rows, torch.device(device)) for w in probe
        )
        kind = GroupedExperts if probe is None else moe_fp8_w8a8.Fp8Experts if is_fp8 else moe_wna16.QuantizedExperts
        self._layers: list[Any] = []
        self._dense: list[tuple[torch.Tensor, ...]] = []  # the first layer's weights
        for _ in range(1 if device == "meta" else self.num_layers):
            logits = torch.randn(shape.experts, shape.hidden, device=device).to(self._dtype)
            router = Router(FusedLinear(logits, None, "silu", False))
            self._layers.append(kind(self._spec, router, self._pairs(), "silu", False))
        self._x = torch.randn(cell.rows, shape.hidden, device=device).to(self._dtype)
        self._norm = torch.ones(shape.hidden, device=device, dtype=self._dtype)
        self._module = moe_few_w16a16 if probe is None else moe_fp8_w8a8 if is_fp8 else moe_wna16
        self.parts = {"layer": _expert_candidates(self._module, cell.rows)}
        expert = sum(2 * n * k for n, k in self._sizes) if probe is None else sum(w.nbytes for w in probe)
        self.num_bytes = expert * (1 if device == "meta" else self._num_active())

    def _pairs(self) -> Iterator[tuple[Any, ...]]:
        is_first = not self._layers
        for _ in range(self._spec.all_experts):
            if self._form == "bf16":
                pair = tuple(torch.randn(s, device=self._device, dtype=self._dtype) / s[1] ** 0.5 for s in self._sizes)
            else:
                pair = tuple(random_weight(self._form, *s, self._device) for s in self._sizes)
            if is_first and self._device != "meta":
                self._dense.append(
                    pair if self._form == "bf16" else tuple(dequantize_torch(w, self._dtype) for w in pair)
                )
            yield pair

    def _num_active(self) -> float:
        """The mean number of experts that a layer's rows choose."""
        ids = [layer._route(layer.router.normed_logits(self._x, self._norm, 1e-5))[0] for layer in self._layers]
        return sum(len(i.unique()) for i in ids) / len(ids)

    def run(self, choices: Choices) -> None:
        with _with(self._module, choices.get("layer") or {}):
            for layer in self._layers:
                layer.add_to(self._x, self._norm, 1e-5, torch.empty_like(self._x))

    def results(self, choices: Choices) -> list[torch.Tensor]:
        with _with(self._module, choices.get("layer") or {}):
            return [self._result(self._layers[0])]

    def _result(self, layer: Any) -> torch.Tensor:
        out = torch.zeros_like(self._x)
        layer.add_to(self._x, self._norm, 1e-5, out)
        return out

    def exact(self) -> list[torch.Tensor]:
        dense = GroupedExperts(self._spec, self._layers[0].router, iter(self._dense), "silu", False)
        return [self._result(dense).double()]

    def others(self) -> dict[str, Callable[[], object]]:
        return {}


def _expert_candidates(module: ModuleType, rows: int) -> list[dict[str, Any]]:
    """Values for the module's constants."""
    if module is moe_few_w16a16:
        shapes = [(4, 1024, 4, 2), (4, 512, 2, 2), (8, 512, 4, 2), (4, 2048, 8, 1), (2, 1024, 2, 2)]
        pairs = [(SkinnyGemmConfig(*up), SkinnyGemmConfig(*down)) for up in shapes for down in shapes]
        return [{"TILES": moe_few_w16a16.FewTiles(*pair)} for pair in pairs]
    if module is moe_fp8_w8a8:
        few = [(16, 64, 128, 4, 6), (16, 64, 128, 4, 3), (16, 64, 256, 4, 3), (16, 128, 128, 4, 4)]
        many = [(64, 128, 128, 8, 3), (128, 128, 128, 8, 3), (64, 64, 128, 4, 4)]
        return [{"moe_fp8_tile": _Rule(Tile(*tile))} for tile in (few if rows <= 256 else many)]
    tiles = [Tile(m, n, STEP, *launch) for m in (8, 16, 32, 64) for n, *launch in ((32, 2, 2), (64, 2, 4), (128, 4, 3))]
    return [{"SINGLE_TILE": tile, "moe_wna16_tile": _Rule(tile)} for tile in tiles]


EXPERTS = Operation(
    ExpertLayers, MIXTURES, ["qwen3-30b-a3b"], ("bf16", *(f for f in FORMS if f != "int4-minimums")),
    [1, 8, 64, 256, 2048],
)  # fmt: skip
