"""Operations that rotate a step's heads and store them in a paged cache."""

import torch

from runtime.base.model.decoder_spec import RopeSpec
from runtime.kernels import operations as ops
from runtime.kernels.attention.latent_torch import LatentForm
from runtime.kernels.attention.rope import HeadForm, rope_store_kv_torch, rope_table
from runtime.kernels.attention.stored_kv import dequantize_kv
from tests.kernels.case import Case, Draw, Outputs, closely

POSITIONS, BLOCKS, BLOCK = 64, 43, 7  # of a cache
STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # of float32 rows, on a CPU
# A kernel rounds the sum of two products, the reference each product.
NEAR_SUMS = {torch.float32: 4e-6, torch.float16: 6e-3, torch.bfloat16: 3e-2}


def table_of(draw: Draw, dim: int, rope: RopeSpec = RopeSpec()) -> torch.Tensor:  # noqa: B008
    return draw.put(rope_table(rope, dim, POSITIONS, torch.float64))


def rotate_and_store(kernels, heads, table, positions, index, *others):
    """The tokens' rows of the table, as the backend needs them."""
    kv, form, *scales = others
    store, rope = kernels[ops.ROPE_STORE_KV], kernels[ops.ROPE_ROWS](table, positions)
    if store is not rope_store_kv_torch or scales or kv.dtype == heads.dtype:
        return store(heads, rope, kv, index, form, *scales)
    wide = kv.to(heads.dtype)  # torch stores no float32 rows in 16 bits
    result = store(heads, rope, wide, index, form)
    kv.copy_(wide)
    return result


def read(*arguments) -> Outputs:
    """The cache's numbers, and each token's scales."""
    kv, _, *scales = arguments[4:]
    if not scales:
        return [kv]
    by_head = scales[0].dim() == 2
    numbers = dequantize_kv(kv.flatten(2, 3), scales[0] if by_head else scales[0].flatten(1, 2))
    return [numbers] if by_head else [numbers, scales[0]]


def nearly(got: Outputs, want: Outputs, dtype: torch.dtype, near: float) -> None:
    """A stored value may differ by one step if the kernel's unrounded value is on the other side."""
    closely(got[:1] + got[2:], want[:1] + want[2:], dtype, max(near, 2e-3 if got[2:] else 0))
    a, b = got[1].float(), want[1].float()
    allowed = b.abs().amax(-1, keepdim=True) / 100 + 1e-5 if got[2:] else b.abs() / 8 + 1e-2
    assert ((a - b).abs() <= allowed).all()
    assert (a != b).float().mean() < (0.02 if dtype == torch.float32 else 0.2)


def rope_store(
    tokens: int, heads: int, kv_heads: int, dim: int, kinds: str = "qkv", norms: bool = False, v_norm: bool = False,
    stored: str = "", gap: int = 0, rope: RopeSpec = RopeSpec(), **options,  # noqa: B008
) -> Case:  # fmt: skip
    def arguments(draw: Draw):
        sizes = torch.logspace(-6, 2.5, max(tokens, 1))[:tokens, None, None] if stored else 1.0
        all_heads = heads + (len(kinds) - 1) * kv_heads
        qkv = draw.rows(tokens, all_heads, dim, gap=gap * dim, size=sizes)
        if stored and tokens > 3:
            qkv[2, heads + 1 :] = 0
        positions, index = draw.below(POSITIONS, tokens), draw.places(BLOCKS * BLOCK, tokens)
        weights = (draw.randn(dim), draw.randn(dim)) if norms else (None, None)
        form = HeadForm(kinds, *weights, 1e-5, v_norm)
        shape, scales = (2, kv_heads, BLOCKS, BLOCK, dim), ()
        kv = torch.full(shape, 7.0, device=draw.device)  # only the tokens' places may change
        kv = kv.to((STORED | SHORT)[stored]) if stored else draw.put(kv)
        if stored == "fp8":
            scales = ((torch.rand(2, kv_heads, generator=draw.generator) / 100 + 1e-4).to(draw.device),)
        elif stored == "int8":
            scales = (torch.full((*shape[1:4], 2), 0.5, dtype=torch.float16, device=draw.device),)
        return qkv, table_of(draw, dim, rope), positions, index, kv, form, *scales

    name = f"rope store {tokens} x {heads}+{kv_heads} {dim} {kinds}{' norms' * norms} {stored}"
    return Case(
        name, ops.ROPE_STORE_KV, arguments, (0, 2, 3), call=rotate_and_store, read=read, near=NEAR_SUMS,
        compare=nearly if stored in STORED else closely, llvm_is_exact=not norms and not v_norm, **options,
    )  # fmt: skip


def latent_store(tokens: int, heads: int, rank: int, rope_dim: int, interleaved: bool, nope: int = 12, on: str = ""):
    def arguments(draw: Draw):
        q = draw.rows(tokens, heads, nope + rope_dim, gap=8)
        latents = draw.rows(tokens, rank + rope_dim)
        positions, index = draw.below(POSITIONS, tokens), draw.places(BLOCKS * BLOCK, tokens)
        kv = draw.put(torch.full((1, 1, BLOCKS, BLOCK, rank + rope_dim), 7.0))
        return (
            q,
            latents,
            table_of(draw, rope_dim),
            positions,
            index,
            kv,
            LatentForm(draw.randn(rank), 1e-6, interleaved),
        )

    def call(kernels, q, latents, table, positions, index, kv, form):
        kernels[ops.LATENT_STORE](q, latents, kernels[ops.ROPE_ROWS](table, positions), kv, index, form)

    name = f"latent store {tokens} x {heads} {rank}+{rope_dim}{' interleaved' * interleaved}"
    return Case(
        name, ops.LATENT_STORE, arguments, (0, 1, 3, 4), (0, 5), call, near=NEAR_SUMS, faults=(1,),
        on=on or ("triton llvm cuda" if rank % 16 == 0 else "triton cuda"),
    )  # fmt: skip


PROPORTIONAL = RopeSpec(type="proportional", partial=0.25)
CASES = [
    rope_store(1, 1, 1, 64),
    rope_store(5, 4, 2, 64, norms=True, gap=1),
    rope_store(3, 6, 2, 80, gap=2),
    rope_store(2, 9, 3, 16, norms=True),
    rope_store(9, 3, 2, 8),
    rope_store(9, 3, 2, 24, norms=True, gap=5),
    rope_store(2, 8, 1, 96),
    rope_store(0, 2, 1, 16),
    rope_store(2, 40, 8, 128, norms=True, gap=1),
    *(rope_store(3, 5, 2, 48, kinds, True, True, rope=PROPORTIONAL) for kinds in ("qkv", "qk", "q")),
    *(rope_store(9, 3, 2, dim, stored=stored) for stored in STORED for dim in (24, 64, 80)),
    *(rope_store(40, 9, 3, 64, norms=True, stored=stored) for stored in STORED),
    *(rope_store(9, 3, 2, dim, stored=stored, on="llvm") for stored in SHORT for dim in (24, 64)),
    *(
        rope_store(*sizes, norms=norms, on="cuda")
        for sizes in ((256, 32, 8, 64), (300, 24, 8, 128), (5, 4, 1, 256), (3, 32, 32, 80))
        for norms in (False, True)
    ),
    *(
        rope_store(200, *heads, norms=norms, stored=stored, on="cuda")
        for heads in ((32, 8, 128), (6, 2, 80)) for stored in STORED for norms in (False, True)
    ),
    *(
        latent_store(5, *sizes, interleaved)
        for sizes in ((1, 32, 16), (3, 20, 6), (20, 48, 8), (70, 16, 4), (20, 32, 64)) for interleaved in (False, True)
    ),
    *(latent_store(300, heads, 512, 64, True, nope, "cuda") for heads, nope in ((16, 128), (20, 192))),
]  # fmt: skip
