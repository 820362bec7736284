"""Attention over latents: one vector a token for all heads, read by queries that absorb the map to keys."""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels import operations as ops
from runtime.kernels.attention.paged_attention import AttentionForm, paged_attention_torch
from tests.kernels.case import Case, Draw
from tests.kernels.cases.attention import Spans, cut, plan_of, single_tokens
from tests.support.kernels.attention_cases import without_hidden
from tests.support.kernels.latent_cases import LatentSizes, latent_case

NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def attend(
    kernels: Any, q: torch.Tensor, kv: torch.Tensor, rows: Any, weight: torch.Tensor, nope: int, first_key: int
) -> torch.Tensor:
    if kernels.name == "torch":
        kv = kv.nan_to_num()
    if kernels.name != "reference":
        plan, up = plan_of(kernels, q, kv, rows), kernels[ops.LATENT_UP](weight, nope)
        return kernels[ops.LATENT_ATTENTION](q, kv, plan, up, 0.1, first_key)
    (num_heads, _, rank), wide = weight.shape, kv.expand(2, *kv.shape[1:])
    absorbed = torch.einsum("nhk,hkr->nhr", q[..., :nope], weight[:, :nope])
    queries = torch.cat((absorbed, q[..., nope:]), -1)
    mixed = paged_attention_torch(queries, wide, single_tokens(rows), AttentionForm(0.1, first_key=first_key))
    mixed = mixed.unflatten(1, (num_heads, -1))[..., :rank]
    return torch.einsum("nhr,hdr->nhd", mixed, weight[:, nope:]).flatten(1)


def latents(
    kind: str, spans: Spans, sizes: LatentSizes, block: int = 16, padding: int = 0,
    bounds: dict[str, int] | None = None, near=NEAR, on: str = "torch triton llvm",
    value: int = 16, first_key: int = 0,
) -> Case:  # fmt: skip
    def arguments(draw: Draw):
        own = sorted(spans, key=lambda span: (span[1] != 1, span[0] * (span[1] == 1)))
        _, q, kv, rows = latent_case(own, sizes, block, draw.dtype, draw.device, padding)
        for name, bound in (bounds or {}).items():
            setattr(rows, name, bound)
        kv, nope = without_hidden(kv, rows, 0, first_key), sizes.nope_dim
        q[..., :nope] = torch.randn(q[..., :nope].shape, generator=draw.generator)
        q = torch.nn.functional.pad(q.flatten(1), (0, 24))[:, :-24].unflatten(1, q.shape[1:])  # rows of a product
        weight = torch.randn(sizes.num_heads, nope + value, sizes.rank, generator=draw.generator) * sizes.rank**-0.5
        tensors = q, kv, weight.to(draw.device, draw.dtype)
        q, kv, weight = (x.double() for x in tensors) if draw.wide else tensors
        return q, kv, rows, weight, nope, first_key

    name = f"latents, {kind} {spans} {sizes} {block} {first_key}"
    on = on if sizes.rank % 16 == 0 and value % 16 == 0 else on.replace("llvm", "")
    return Case(
        name,
        ops.LATENT_ATTENTION,
        arguments,
        call=attend,
        parts=cut,
        near=near,
        on=on,
        bits_on="torch llvm cuda",
        faults=(),
    )


SIZES = [LatentSizes(1, 32, 16), LatentSizes(3, 20, 6), LatentSizes(20, 48, 8), LatentSizes(70, 16, 4)]
LARGE = [LatentSizes(16, 512, 64, 128), LatentSizes(20, 512, 64, 192), LatentSizes(128, 512, 64, 128)]
LENGTHS = [(n, 1) for n in (0, 62, 63, 64, 133, 700, 2047, 5000)]
PROMPTS = [(0, 1), (0, 71), (65, 133), (129, 1), (1500, 60), (0, 213)]
CASES = [
    *(
        latents("decode", spans, sizes, padding=padding)
        for sizes in SIZES for spans, padding in (([(0, 1), (62, 1), (133, 1)], 1), ([(100, 1)], 0))
    ),
    *(
        latents("prompts", spans, sizes, block, near={torch.float32: 1e-5})
        for sizes in SIZES for long in (71 if sizes.num_heads < 20 else 9,)
        for spans, block in (
            ([(0, long), (65, long // 2), (129, 1), (0, 0)], 16), ([(70, 3), (0, 3), (63, 1)], 3),
            ([(0, 1), (40, 1), (20, 9)], 16),
        )
    ),
    *(
        latents("first key", spans, sizes, padding=padding, near={torch.float32: 1e-5}, first_key=1)
        for sizes in (LatentSizes(3, 32, 16), LatentSizes(5, 20, 6))
        for spans, padding in (
            ([(1, 1), (62, 1), (133, 1)], 1), ([(1, 3), (70, 3), (0, 3)], 0), ([(1, 70), (65, 20)], 0),
            ([(1300, 1)], 0),
        )
    ),
    latents("segments", [(1300, 1), (20, 1)], LatentSizes(3, 16, 4), 64),
    latents("segments", [(600, 2)], LatentSizes(3, 16, 4), bounds={"max_len": 1 << 17}),
    *(
        latents("a long row", [(511, 1)] * 30 + [(29_999, 1), (0, 1)], sizes, padding=2, on="cuda")
        for sizes in LARGE
    ),
    *(
        latents("large", spans, sizes, block, padding, on="cuda", value=sizes.nope_dim)
        for sizes in [*LARGE, LatentSizes(5, 96, 16)]
        for spans, block, padding in (
            (LENGTHS, 16, 3), (LENGTHS[:5] * 40, 32, 0), ([(3000, 1)], 64, 0), (PROMPTS, 16, 0), ([(0, 1300)], 16, 0),
            ([(0, 600), (2000, 700), (130, 900)], 16, 0),
        )
    ),
    *(
        latents("large first key", spans, sizes, padding=padding, on="cuda", value=sizes.nope_dim, first_key=1)
        for sizes in LARGE[:2]
        for spans, padding in (([(n + 1, 1) for n, _ in LENGTHS], 3), ([(1, 1300)], 0), ([(1, 4), (700, 4)], 2))
    ),
]  # fmt: skip
