"""Linear layers on a GPU against float64; deterministic ones give a row the same bits in any batch."""

import pytest
import torch

from runtime.kernels.linear.batch_invariant_linear import batch_invariant_linear_torch, batch_invariant_linear_triton
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.skinny_gemm import MAX_ROWS, skinny_gemm_torch, skinny_gemm_triton

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
FORMS = {
    "plain": {},
    "bias": {"bias": True},
    "normed": {"norm_weight": True, "bias": True},
    "gated": {"norm_weight": True, "activation": "silu"},
    "gelu": {"activation": "gelu_tanh"},
    "residual": {"residual": True},
    "logits": {"norm_weight": True, "out_dtype": torch.float32},
}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("size_out", "size_in"), [(3072, 2048), (576, 576), (960, 1536), (1002, 5000), (28672, 4096)])
def test_few_rows_against_float64(size_out, size_in, dtype, near, form):
    generator = torch.Generator("cuda").manual_seed(size_out)
    randn = lambda *shape: torch.randn(*shape, device="cuda", generator=generator).to(dtype)  # noqa: E731
    weight = (randn(size_out, size_in) * size_in**-0.5).to(dtype)
    for rows in (1, 2, 7, MAX_ROWS):
        x = randn(rows, size_in + 8)[:, :size_in]
        options = dict(FORMS[form])
        if "bias" in options:
            options["bias"] = randn(size_out)
        if "norm_weight" in options:
            options |= {"norm_weight": randn(size_in), "eps": 1e-5}
        if "residual" in options:
            options["residual"] = randn(rows, size_out)
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        want = skinny_gemm_torch(x.double(), weight.double(), **wide | {"out_dtype": None})
        got = skinny_gemm_triton(x, weight, **options)
        assert got.dtype == options.get("out_dtype", dtype)
        assert error(got, want) < near, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("size_out", "size_in"), [(3072, 2048), (2048, 8192), (16384, 2048), (4096, 14336), (576, 1536), (1002, 1160)]
)
def test_fixed_linear_is_batch_invariant(size_out, size_in, dtype):
    generator = torch.Generator("cuda").manual_seed(size_out)
    x = torch.randn(2100, size_in, device="cuda", generator=generator).to(dtype)
    weight = (torch.randn(size_out, size_in, device="cuda", generator=generator) * size_in**-0.5).to(dtype)
    bias = torch.randn(size_out, device="cuda", generator=generator).to(dtype)
    whole = batch_invariant_linear_triton(x, weight, bias)
    want = batch_invariant_linear_torch(x[:64].double(), weight.double(), bias.double())
    assert error(whole[:64], want) < {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for first, rows in ((0, 1), (2099, 1), (5, 7), (63, 2), (1000, 32), (7, 64), (128, 65), (300, 256), (11, 700)):
        part = batch_invariant_linear_triton(x[first : first + rows], weight, bias)
        assert torch.equal(part, whole[first : first + rows]), (first, rows)
    sums = batch_invariant_linear_triton(x, weight, bias, residual=whole.clone())
    assert error(sums[:64], want + whole[:64].double()) < {torch.float32: 3e-6}.get(dtype, 8e-3)
    for first, rows in ((0, 1), (5, 7), (7, 64), (300, 256)):
        part = batch_invariant_linear_triton(
            x[first : first + rows], weight, bias, residual=whole[first : first + rows].clone()
        )
        assert torch.equal(part, sums[first : first + rows]), (first, rows)


@pytest.mark.parametrize(
    ("size_out", "size_in", "dtype", "with_bias", "activation"),
    [
        (6144, 4096, torch.bfloat16, False, "silu"),  # one chunk
        (28672, 4096, torch.bfloat16, False, "silu"),
        (4096, 4096, torch.bfloat16, False, "gelu_tanh"),  # two
        (2048, 2048, torch.float16, True, "silu"),  # four
        (2560, 9728, torch.bfloat16, True, "gelu_tanh"),
        (1002, 1160, torch.bfloat16, True, "silu"),  # the last chunk is shorter
        (34, 56, torch.bfloat16, False, "silu"),
    ],
)
def test_deterministic_layers_are_batch_invariant(size_out, size_in, dtype, with_bias, activation):
    """Each row of the weight has the opposite of each column elsewhere, and x the same value, so exact sums are zero.
    The results are rounding errors, and float32 logits show any other order of sums."""
    generator = torch.Generator("cuda").manual_seed(size_out)
    randn = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)  # noqa: E731
    half, order = randn(size_out, size_in // 2), torch.randperm(size_in, device="cuda", generator=generator)
    weight = torch.cat((half, -half), 1)[:, order].to(dtype)
    half = randn(600, size_in // 2)
    half *= torch.randint(-6, 7, half.shape, device="cuda", generator=generator).exp2()
    x, norm = torch.cat((half, half), 1)[:, order].to(dtype), torch.ones(size_in, device="cuda", dtype=dtype)
    start = randn(600, size_out).to(dtype)
    layer = FusedLinear(weight, randn(size_out).to(dtype) if with_bias else None, activation, deterministic=True)

    def results(first: int, rows: int) -> list[torch.Tensor]:
        part, residual = x[first : first + rows], start[first : first + rows].clone()
        layer.add_to(residual, part)
        return [layer.logits(part, norm, 1e-5), layer.normed(part, norm, 1e-5), layer.gated(part, norm, 1e-5), residual]

    whole = results(0, 600)
    for rows in (1, 2, 7, 8, 9, 15, 16, 17, 32, 63, 64, 65, 96, 128, 129, 192, 256, 257, 512, 513):
        for first in (0, 600 - rows):
            parts = results(first, rows)
            for verb, part, want in zip(("logits", "normed", "gated", "add_to"), parts, whole, strict=True):
                assert torch.equal(part, want[first : first + rows]), (verb, first, rows)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("size_out", "size_in"), [(152, 64), (60, 76), (576, 128)])
def test_a_residual_is_added_after_the_whole_sum(size_out, size_in, with_bias):
    """Also where one matrix instruction has all columns: it must not begin with the residual or the bias."""
    randn = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()  # noqa: E731
    weight, x, start = randn(size_out, size_in), randn(2048, size_in), randn(2048, size_out)
    layer = FusedLinear(weight, randn(size_out) if with_bias else None, "silu", deterministic=True)

    def sums(first: int, rows: int) -> torch.Tensor:
        residual = start[first : first + rows].clone()
        layer.add_to(residual, x[first : first + rows])
        return residual

    whole = sums(0, 2048)
    for rows in (4, 16, 64):
        assert torch.equal(torch.cat([sums(first, rows) for first in range(0, 2048, rows)]), whole), rows


@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS])
def test_a_graph_of_dependent_layers_equals_layers_one_by_one(rows):
    """Programmatic dependent launch lets kernels overlap; each must still see the results of the one before."""
    generator = torch.Generator("cuda").manual_seed(rows)
    randn = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)  # noqa: E731
    hidden, ffn = 1024, 2816
    shapes = ((3 * hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn))
    layers = [[(randn(*shape) * shape[1] ** -0.5).bfloat16() for shape in shapes] for _ in range(12)]
    start, norm = randn(rows, hidden).bfloat16(), randn(hidden).bfloat16()

    def forward(after_each) -> torch.Tensor:
        residual = start.clone()
        for qkv, out, gate_up, down in layers:
            x = skinny_gemm_triton(residual, qkv, norm_weight=norm, eps=1e-5)
            after_each()
            skinny_gemm_triton(x[:, hidden : 2 * hidden], out, residual=residual)
            after_each()
            x = skinny_gemm_triton(residual, gate_up, norm_weight=norm, eps=1e-5, activation="silu")
            after_each()
            skinny_gemm_triton(x, down, residual=residual)
            after_each()
        return residual

    want = forward(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(lambda: None)
    for _ in range(50):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, want)
