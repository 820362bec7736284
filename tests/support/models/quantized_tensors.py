"""A checkpoint of a dict of tensors, and the layout of a quantized weight in it."""

from collections.abc import Mapping

import torch

from runtime.kernels.numerics import Numerics
from runtime.quant import METHODS
from runtime.quant.model_formats import LAYOUTS
from tests.support.models.quantized import Format

CPU = torch.device("cpu")


class Tensors:
    """A checkpoint of a dict of tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self):
        return sorted(self.tensors)

    def __contains__(self, name):
        return name in self.tensors

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def type_name(self, name):
        return str(self.tensors[name].dtype)

    def dtype(self, name):
        return self.tensors[name].dtype

    def is_dense(self, name):
        return False

    def tensor(self, name, dtype, device, part=None):
        tensor = self.tensors[name]
        if part is not None:
            tensor = tensor.narrow(part.dim, part.start, part.stop - part.start)
        return tensor.to(device, dtype, copy=True)


def numerics(dtype: torch.dtype) -> Numerics:
    return Numerics(dtype, CPU, "torch", packed=False, deterministic=False)


def random_weight(shape: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), generator


def layout_of(form: Format):
    config = form.config or next(iter(form.files.values()))
    scheme = METHODS[config.get("quant_method", "modelopt")](config)("layers.0.q.weight", "model.layers.0.q_proj")
    return LAYOUTS[scheme.layout](scheme)


def source_of(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return Tensors({f"q_proj.{name}": tensor for name, tensor in tensors.items()})


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """The same bits, minus zero and NaN included."""
    return torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))
