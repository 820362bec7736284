"""Operations on rows: norms, activations, gates, a table's rows, and small products of adapters."""

from unittest import mock

import torch

from runtime.kernels import operations as ops
from runtime.kernels.linear import lora
from runtime.kernels.linear.lora import make_adapters
from tests.kernels.case import Case, Draw

NORMS = [(1, 1), (3, 7), (2, 64), (5, 100), (4, 576), (2, 1025), (0, 16)]
WIDTHS = [(1, 1), (3, 50), (2, 1024), (2, 1500), (0, 8)]
LARGE = [(7, 4096), (256, 5000)]
ACTIVATIONS = [("silu", True), ("gelu_tanh", True), ("swiglu_clamped", True), ("silu", False), ("gelu_tanh", False)]


def sized(name, operation, make, sizes, **options):
    """A case of each size. Large ones are for GPUs."""
    for size in [*sizes, *LARGE]:
        on = {"on": "cuda"} if size in LARGE else {}
        yield Case(f"{name} {size}", operation, lambda draw, size=size: make(draw, *size), **on, **options)


def adapters(sizes: tuple[int, ...], size_in: int, num_rows: int, rank: int = 5, tiles: bool = False, **options):
    """Rows of several adapters, and of none. The third adapter changes one part of the layer."""

    def arguments(draw: Draw):
        stacks = make_adapters(sizes, size_in, 3, rank, draw.dtype, torch.device("cpu"))
        a, b = draw.randn(*stacks.a.shape, size=size_in**-0.5), draw.randn(*stacks.b.shape, size=rank**-0.5)
        b[2, sizes[0] :] = 0
        stacks = stacks._replace(a=a, b=b, results=stacks.results.to(draw.device))
        rows = draw.ids(*([2, 0, 1, 2, 0, 3, 3] * num_rows)[:num_rows])
        return draw.rows(num_rows, sum(sizes), gap=8), draw.rows(num_rows, size_in, gap=7), rows, stacks

    def call(kernels, *arguments):
        with mock.patch.object(lora, "MAX_SINGLE_ROWS", 0 if tiles else lora.MAX_SINGLE_ROWS):
            kernels[ops.ADD_ADAPTERS](*arguments)

    near = {dtype: 4 * near for dtype, near in Case("", ops.SOFT_CAP, lambda draw: ()).near.items()}
    name = f"adapters {num_rows} x {sizes} {size_in}"
    return Case(name, ops.ADD_ADAPTERS, arguments, (0, 1, 2), (0,), call, near=near, faults=(1,), **options)


CASES = [
    *sized("rms norm", ops.RMS_NORM, lambda d, n, size: (d.rows(n, size), d.randn(size), 1e-5), NORMS),
    *sized(
        "rms norm, added", ops.RMS_NORM,
        lambda d, n, size: (d.rows(n, size), d.randn(size), 1e-5, d.randn(n, size)), NORMS[1:4], tokens=(0, 3),
    ),
    *sized(
        "rms norm in place", ops.NORM_IN_PLACE, lambda d, n, size: (d.rows(n, size), d.randn(size), 1e-5), NORMS,
        written=(0,),
    ),
    *sized("layer norm", ops.LAYER_NORM, lambda d, n, size: (d.rows(n, size), d.randn(2, size), 1e-5), NORMS[1:]),
    *(
        case
        for kind, gated in ACTIVATIONS
        for case in sized(
            f"{kind}{' gate' * gated}", ops.GATED_ACTIVATION,
            lambda d, n, size, gated=gated: (d.randn(n, size * (1 + gated), size=4.0),), WIDTHS,
            activation=kind, gated=gated,
        )
    ),
    *sized(
        "output gate", ops.GATE_OUTPUT, lambda d, n, size: (d.randn(n, size), d.rows(n, size)), WIDTHS, tokens=(0, 1),
        written=(0,), faults=(1,),
    ),
    *sized("soft cap", ops.SOFT_CAP, lambda d, n, size: (d.rows(n, size, size=9.0), 5.0), WIDTHS),
    *sized("multiply", ops.MULTIPLY, lambda d, n, size: (d.randn(n, size), d.randn(1)[0]), WIDTHS),
    *sized("lookup", ops.LOOKUP, lambda d, n, size: (d.randn(9, size), d.below(9, n), 0.3), WIDTHS, tokens=(1,)),
    *(adapters(sizes, size_in, n) for sizes, size_in in (((40, 24, 8), 72), ((130,), 33)) for n in (1, 7)),
    *(adapters(sizes, size_in, 40, tiles=True) for sizes, size_in in (((40, 24, 8), 72), ((130,), 33))),
    *(
        adapters(sizes, size_in, n, rank, on="cuda")
        for sizes, size_in in (((2048, 512, 512), 2048), ((8192, 8192), 2048), ((4096,), 14336))
        for rank, n in ((16, 1), (64, 64), (16, 1030))
    ),
]  # fmt: skip
