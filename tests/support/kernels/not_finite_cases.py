"""Rows that are not finite, in every kernel that finds a maximum or bounds numbers, against the torch twins (C9).

Row 1 of each case holds a NaN or an infinity. It must not become finite, and the other rows keep their bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.base.types import SamplingParams
from runtime.core.plan import NewSlot
from runtime.kernels.attention.latent_attention import attend_rows
from runtime.kernels.experts.moe_fp8_w8a8 import Fp8Experts
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.experts.moe_w16a16 import GroupedExperts
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.quantized.activations import quantize_fp8_torch, quantize_fp8_triton, quantize_int16_triton
from runtime.kernels.quantized.fp8_w8a8_gemm import fp8_w8a8_gemm_triton
from runtime.kernels.quantized.int_wna16_gemm import int_wna16_gemm_triton
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, pack_planes, plane_of, quantized_weight
from runtime.kernels.quantized.weight_conversions import quantize_fp8_weight_triton
from runtime.kernels.quantized.wna16_skinny_gemm import wna16_skinny_gemm_triton
from runtime.kernels.sampling.sample import NUM_PARAMS, sample_tokens_triton
from runtime.quant.encodings import LARGEST_E4M3, SMALLEST_SCALE
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.transfers import Transfers
from tests.support.kernels.latent_cases import LatentSizes, latent_case

VALUES = (torch.nan, torch.inf, -torch.inf)
OTHERS = [0, 2]


def check_alone(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, value: float) -> torch.Tensor:
    """Compute x with the value in row 1, check that other rows are unchanged, and return row 1 of the result."""
    clean = compute(x)
    spoilt = x.clone()
    spoilt[1, 5] = value
    got = compute(spoilt)
    assert clean.isfinite().all()
    assert torch.equal(got[OTHERS], clean[OTHERS]), "other rows keep their bits"
    return got[1]


def check_fp8_rows(x: torch.Tensor, value: float) -> None:
    ones = torch.ones_like(x[0])
    for options in ({}, {"norm_weight": ones, "eps": 1e-5}, {"activation": "silu"}):
        wide = torch.cat((x, x), 1) if "activation" in options else x
        row = check_alone(lambda x: quantize_fp8_triton(x, **options).dequantize(torch.float32), wide, value)  # noqa: B023
        spoilt = wide.clone()
        spoilt[1, 5] = value
        want = quantize_fp8_torch(spoilt, **options).dequantize(torch.float32)[1]
        assert not want.isfinite().any()
        assert not row.isfinite().any(), options


def check_fp8_product(x: torch.Tensor, value: float) -> None:
    weight = quantized_weight("fp8", _codes(x, 32, x.shape[1]), torch.ones(32, 1, device=x.device))
    row = check_alone(lambda x: fp8_w8a8_gemm_triton(quantize_fp8_triton(x), weight, dtype=torch.float32), x, value)
    assert not row.isfinite().any()


def check_fp8_weights(x: torch.Tensor, value: float) -> None:
    row = check_alone(lambda x: quantize_fp8_weight_triton(x, LARGEST_E4M3, SMALLEST_SCALE)[1], x, value)
    assert row.isnan().all()


def check_integer_product(x: torch.Tensor, value: float) -> None:
    weight = _int4(x, 32)
    row = check_alone(lambda x: int_wna16_gemm_triton(quantize_int16_triton(x), weight, dtype=torch.float32), x, value)
    assert not row.isfinite().any()


def check_one_row_product(x: torch.Tensor, value: float) -> None:
    """Products of one row split it into limbs; products of few rows multiply it directly."""
    for weight in (_int4(x, 32), quantized_weight("int8", _int8(x, 32), torch.ones(32, 1, device=x.device))):
        for rows in (slice(1, 2), slice(0, 3)):
            spoilt = x.clone()
            spoilt[1, 5] = value
            got = wna16_skinny_gemm_triton(spoilt[rows], weight, out_dtype=torch.float32)
            assert not got[got.shape[0] // 2].isfinite().any()


def check_mixture(x: torch.Tensor, value: float, kind: str) -> None:
    """A row through routing, the rounding between both products, and the sum of the experts' results."""
    num_experts = 2 if kind == "fp8" else 12
    size, router = x.shape[1], torch.randn(num_experts, x.shape[1], device=x.device).to(x.dtype)
    route = Router(Linear(lambda x: (x @ router.T).contiguous(), rms_norm_triton, torch.abs))
    # The interpreter takes seconds for codes. Without deterministic mode, a choice has its own programs.
    forms = ((True, True),) if kind == "fp8" else itertools.product((False, True), (False, True))
    for normalized, deterministic in forms:
        spec = ExpertsSpec(num_experts, 1 if kind == "fp8" else 2, normalized)
        if kind == "fp8":
            pair = tuple(
                quantized_weight("fp8", _codes(x, n, size), torch.full((n, 1), 2.0**-9, device=x.device))
                for n in (2 * size, size)
            )
            mixture = Fp8Experts(spec, route, [pair] * num_experts, "silu", True)
        else:
            pair = tuple(torch.randn(n, size, device=x.device).to(x.dtype) / 16 for n in (2 * size, size))
            mixture = GroupedExperts(spec, route, [pair] * num_experts, "silu", deterministic)

        def layer(x: torch.Tensor, mixture: GroupedExperts = mixture) -> torch.Tensor:
            out = torch.zeros_like(x)
            mixture.add_to(x.clone(), torch.ones_like(x[0]), 1e-5, out)
            return out

        assert not check_alone(layer, x, value).isfinite().any()


def check_routing(x: torch.Tensor, value: float) -> None:
    """One router logit that is not finite spoils its token's weights, but names existing experts."""
    kinds = "softmax", "sigmoid", "softmax_of_chosen"
    for normalized, scores, top_groups in itertools.product((False, True), kinds, (1, 2)):
        layer = GroupedExperts.__new__(GroupedExperts)
        groups = {"groups": top_groups + 1, "top_groups": top_groups, "group_score": "top2"}
        layer.spec = ExpertsSpec(12, 3, normalized, scores=scores, **(groups if top_groups > 1 else {}))
        layer.router = Router(Linear(torch.abs, rms_norm_triton, torch.abs))
        logits = x[:, :12].float().contiguous()
        row = check_alone(lambda x: layer._route(x)[1].view(3, 3), logits, value)  # noqa: B023
        assert not row.isfinite().any() or value == -torch.inf or (scores, value) == ("sigmoid", torch.inf)
        logits[1, 5] = value
        ids = layer._route(logits)[0]
        assert ((ids >= 0) & (ids < 12)).all()


def check_latents(x: torch.Tensor, value: float) -> None:
    """A latent that is not finite spoils the rows that see it, and no others."""
    sizes = LatentSizes(3, 32, 16)
    for spans in ([(20, 1), (37, 1), (5, 1)], [(20, 3), (30, 8), (0, 4)]):
        over_latents, q, clean, rows = latent_case(spans, sizes, dtype=x.dtype, device=str(x.device))
        edges, spoilt = rows.q_starts.tolist(), clean.clone()
        spoilt[0, 0, int(rows.tables[rows.slots[1], 0]), 3, 0] = value
        for deterministic in (False, True):
            before, after = (
                attend_rows(over_latents, q[..., 12:], kv, rows, scale=0.1, deterministic=deterministic)
                for kv in (clean, spoilt)
            )
            others = [i for i in range(len(q)) if not edges[1] <= i < edges[2]]
            assert torch.equal(after[others], before[others])
            assert not after[edges[1] : edges[2]].isfinite().all(-1).any()


def check_samples(x: torch.Tensor, value: float) -> None:
    """A row of logits fails with the token -1, with any parameters."""
    device, vocab = x.device, 300
    logits = torch.randn(3, vocab, device=device)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    for settings in ({"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1}):
        sampler = DeviceSampler(3, vocab, (2,), Transfers(device))
        state = torch.zeros((4, 8 + NUM_PARAMS), dtype=torch.int32, device=device)
        tokens, params = state[:, :8], state[:, 8:]
        for slot in range(3):
            new = NewSlot(slot, slots[:1].cpu().numpy(), 1, 7 + slot, SamplingParams(**settings))
            params[slot] = torch.from_numpy(sampler.add(new)).to(device)
        clean = sample_tokens_triton(logits.clone(), slots, slots + 1, tokens, params).tolist()
        spoilt = logits.clone()
        spoilt[1, 5] = value
        got = sample_tokens_triton(spoilt, slots, slots + 1, tokens, params).tolist()
        assert got == [clean[0], -1, clean[2]]


def _int8(x: torch.Tensor, size_out: int) -> torch.Tensor:
    return torch.randint(1, 128, (size_out, x.shape[1]), dtype=torch.int8, device=x.device)


def _codes(x: torch.Tensor, size_out: int, size_in: int) -> torch.Tensor:
    return (torch.rand(size_out, size_in, device=x.device) * 64 + 1).to(torch.float8_e4m3fn)


def _int4(x: torch.Tensor, size_out: int) -> QuantizedWeight:
    codes = torch.randint(9, 16, (size_out, x.shape[1]), dtype=torch.uint8, device=x.device)
    scales = torch.ones(size_out, x.shape[1] // 128, device=x.device)
    return quantized_weight("int4", pack_planes(codes, plane_of(128)), scales, group_size=128)


CASES: dict[str, Callable[[torch.Tensor, float], None]] = {
    "fp8 rows": check_fp8_rows,
    "fp8 product": check_fp8_product,
    "fp8 weights": check_fp8_weights,
    "integer product": check_integer_product,
    "product of one row": check_one_row_product,
    "mixture": lambda x, value: check_mixture(x, value, "dense"),
    "fp8 mixture": lambda x, value: check_mixture(x, value, "fp8"),
    "routing": check_routing,
    "latents": check_latents,
    "samples": check_samples,
}


def check(case: str, value: float, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    CASES[case](torch.randn(3, 128, device=device).to(dtype), value)
