"""CompiledExperts: a mixture of experts on a CPU in six kernels, however many experts are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.cpu.experts.choice import choose_experts, order_choices
from runtime.kernels.cpu.experts.expert_product import add_results, expert_dense_product, expert_int_product
from runtime.kernels.cpu.linear.compiled_linear import CompiledLinear
from runtime.kernels.cpu.linear.dense_linear import DenseLinear
from runtime.kernels.cpu.linear.dense_product import MOST_BLOCKS
from runtime.kernels.cpu.linear.interleaved_linear import InterleavedLinear
from runtime.kernels.cpu.linear.weight_form import COLUMNS, ROWS, WeightForm
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.llvm.launcher import kernel

_MOST_ROWS = 512  # that the buffers between kernels have room for


def compiled_layers(experts: Sequence[tuple[Linear, Linear]]) -> list[tuple[CompiledLinear, CompiledLinear]] | None:
    """The layers as the kernels take them, the gate_up and down of each expert; None if they do not take all."""
    taken = [
        (gate_up, down)
        for gate_up, down in experts
        if isinstance(gate_up, CompiledLinear) and isinstance(down, CompiledLinear)
    ]
    fit = all(layer.is_whole and layer.size_in % ROWS == 0 for pair in taken for layer in pair)
    return taken if fit and len(taken) == len(experts) else None


class CompiledExperts:
    """The experts of a layer. Rows are float32 between kernels, whatever the dtype of the residual."""

    def __init__(
        self, spec: ExpertsSpec, router: Router, experts: Sequence[tuple[CompiledLinear, CompiledLinear]]
    ) -> None:
        self.spec, self.router, self.launcher = spec, router, experts[0][0].launcher
        self.gate_up, self.down = (_ExpertMap([pair[i] for pair in experts]) for i in range(2))

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """`ExpertLayer.add_to`."""
        target = residual if out is None else out
        for rows, own in zip(residual.split(_MOST_ROWS), target.split(_MOST_ROWS), strict=True):
            self._add(rows, norm_weight, eps, own)

    def _add(self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, target: torch.Tensor) -> None:
        weights, choices = self._choose(self._logits(residual, norm_weight, eps))
        prepared = self.gate_up.normed(residual, norm_weight, eps)
        gate_up = self.gate_up.multiply(prepared, choices, choices.rows, "expert gate_up")
        y = self.down.multiply(self.down.activated(gate_up), choices, choices.order, "expert down")
        is_sum = target.dtype == torch.float32 and target.is_contiguous()
        num_rows, columns = target.shape
        total = target if is_sum else self.launcher.buffer("expert sum", num_rows, columns)
        self.launcher.launch(
            kernel(add_results, choices=self.spec.choices, adds=is_sum),
            (y, weights, total, num_rows, columns, y.stride(0)),
            self.launcher.parts(num_rows, y.numel()),
        )
        if not is_sum:
            target.add_(total.to(target.dtype))

    def _logits(self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        logits = self.router.normed_logits(residual, norm_weight, eps)
        return logits.float() if logits.stride(1) == 1 else logits.float().contiguous()

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, _Choices]:
        """The weights of each row's choices, float32 [rows, choices], and their order."""
        spec, router, launcher, num_rows = self.spec, self.router, self.launcher, len(logits)
        ids = launcher.buffer("expert ids", num_rows, spec.choices, dtype=torch.int32)
        weights = launcher.buffer("expert weights", num_rows, spec.choices)
        memory = [launcher.buffer(f"expert {name}", num_rows, spec.num_experts) for name in ("scores", "preferences")]
        arguments = (logits, router.bias, router.scales, *memory, ids, weights, num_rows, logits.stride(0))
        work = 8 * num_rows * spec.num_experts * spec.top_k
        launcher.launch(kernel(choose_experts, spec=spec), arguments, launcher.parts(num_rows, work))
        starts = launcher.buffer("expert starts", spec.all_experts + 1, dtype=torch.int32)
        order, rows = (launcher.buffer(f"expert {name}", ids.numel(), dtype=torch.int32) for name in ("order", "rows"))
        function = kernel(order_choices, num_experts=spec.all_experts, choices=spec.choices)
        launcher.launch(function, (ids, starts, order, rows, ids.numel()), 1)
        if router.record is not None:
            router.chose(ids.clone())
        return weights, _Choices(starts, order, rows)


class _Choices(NamedTuple):
    """The choices of all rows by expert."""

    starts: torch.Tensor  # int32 [all experts + 1]
    order: torch.Tensor  # int32 [rows * choices]: choice numbers
    rows: torch.Tensor  # int32 [rows * choices]: their rows


class _Group(NamedTuple):
    """Weights of one form, which one launch multiplies."""

    form: WeightForm | torch.dtype
    at: int  # their first output
    num_blocks: int  # blocks in each weight
    has_bias: bool
    span: int  # columns of rows that share a scale; 0 for a dense weight


class _ExpertMap:
    """One map of all experts. A launch multiplies the weights that have the same form and place."""

    def __init__(self, layers: Sequence[CompiledLinear]) -> None:
        self.launcher, self.size_in, self.size_out = layers[0].launcher, layers[0].size_in, layers[0].size_out
        self.layers = layers  # keeps the weights
        groups: dict[_Group, torch.Tensor] = {}
        for expert, layer in enumerate(layers):
            for group, tensors in _weights_of(layer):
                if group not in groups:
                    groups[group] = torch.zeros(len(layers), len(tensors), dtype=torch.int64)
                words = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
                groups[group][expert] = torch.tensor(words)
        self.groups = groups
        # Layers that prepare rows, by the columns that share a scale; 0 for dense products.
        self._preparing = {_span_of(layer): layer for layer in layers}

    def normed(self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> dict[int, Any]:
        """The norms of rows, by span."""
        return {span: layer.normed_rows(x, norm_weight, eps) for span, layer in self._preparing.items()}

    def activated(self, x: torch.Tensor) -> dict[int, Any]:
        """Rows after the activation, as `normed` has them."""
        return {
            span: layer.prepared(x, None, 0.0, layer.activation, layer.is_gated)
            for span, layer in self._preparing.items()
        }

    def multiply(self, prepared: dict[int, Any], choices: _Choices, rows: torch.Tensor, name: str) -> torch.Tensor:
        """The product of each choice: float32 [rows * choices, size_out]. `rows` has the rows of x in expert order."""
        out = self.launcher.buffer(name, len(choices.order), self.size_out)
        for group, addresses in self.groups.items():
            is_dense = isinstance(group.form, torch.dtype)
            launch = self._multiply_dense if is_dense else self._multiply_integers
            launch(group, addresses, prepared[group.span], (choices.starts, rows, choices.order), out)
        return out

    def _multiply_integers(
        self, group: _Group, addresses: torch.Tensor, x: Any, chosen: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        num_chunks, limbs = self.size_in // COLUMNS, x.limbs.shape[2]
        constants = {"num_experts": len(addresses), "has_bias": group.has_bias}
        function = kernel(expert_int_product, form=group.form, limbs=limbs, **constants)
        sizes = x.scales.shape[1], group.num_blocks, num_chunks, out.stride(0)
        arguments = (addresses, *chosen, *x, out[:, group.at :], *sizes)
        self.launcher.launch(function, arguments, self._parts(group.num_blocks, len(out)))

    def _multiply_dense(
        self, group: _Group, addresses: torch.Tensor, x: Any, chosen: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        constants = {"num_experts": len(addresses), "has_bias": group.has_bias}
        function = kernel(expert_dense_product, dtype=group.form, **constants)
        sizes = group.num_blocks, self.size_in, x.stride(0), out.stride(0)
        arguments = (addresses, *chosen, x, out[:, group.at :], *sizes)
        self.launcher.launch(function, arguments, self._parts(-(-group.num_blocks // MOST_BLOCKS), len(out)))

    def _parts(self, units: int, num_choices: int) -> int:
        return self.launcher.parts(units, num_choices * units * ROWS * self.size_in)


def _span_of(layer: CompiledLinear) -> int:
    return layer.span if isinstance(layer, InterleavedLinear) else 0


def _weights_of(layer: CompiledLinear) -> list[tuple[_Group, tuple[torch.Tensor | None, ...]]]:
    """The weights of a layer, with the tensors that a kernel reads."""
    if isinstance(layer, DenseLinear):
        group = _Group(layer.values.dtype, 0, len(layer.values), layer.bias is not None, 0)
        return [(group, (layer.values, layer.bias))]
    assert isinstance(layer, InterleavedLinear)
    found, at = list[tuple[_Group, tuple[torch.Tensor | None, ...]]](), 0
    for part, bias in zip(layer.parts, layer.biases, strict=True):
        found.append((_Group(part.form, at, len(part.values), bias is not None, layer.span), (*part.tensors, bias)))
        at += part.shape[0]
    return found
