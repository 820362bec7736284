"""Kernels of latent attention against their torch twins. (bf16 and graphs: tests/gpu/test_gpu_latent.py.)"""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from runtime.kernels.attention import latent_attention, latent_expanded
from runtime.kernels.attention.latent_attention import attend_rows, latent_attention_triton
from runtime.kernels.attention.latent_heads import head_product_torch, head_product_triton
from runtime.kernels.attention.latent_store import latent_store_triton
from runtime.kernels.attention.latent_torch import LatentUp, latent_store_torch
from runtime.kernels.attention.paged_attention import PagedBatch, PagedRows, paged_attention_torch
from runtime.kernels.attention.rope import rope_rows_torch, rope_rows_triton, rope_table
from runtime.spec.decoder_spec import RopeSpec
from tests.support.kernels.attention_cases import rows_of
from tests.support.kernels.latent_cases import LatentSizes, check_latents, latent_case

SIZES = [LatentSizes(1, 32, 16), LatentSizes(3, 20, 6), LatentSizes(20, 48, 8), LatentSizes(70, 16, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_one_token(sizes, dtype):
    check_latents(latent_case([(0, 1), (62, 1), (133, 1)], sizes, dtype=dtype, padding_rows=1), sizes)
    check_latents(latent_case([(100, 1)], sizes, dtype=dtype), sizes)


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_many_tokens(sizes):
    long = 71 if sizes.num_heads < 20 else 9
    check_latents(latent_case([(0, long), (65, long // 2), (129, 1), (0, 0)], sizes), sizes)
    check_latents(latent_case([(70, 3), (0, 3), (63, 1)], sizes, block_size=3), sizes)


def test_positions_in_several_segments():
    sizes = LatentSizes(3, 16, 4)
    check_latents(latent_case([(1300, 1), (20, 1)], sizes, block_size=64), sizes)
    over_latents, q, kv, rows = latent_case([(600, 2)], sizes)
    rows.max_len = 1 << 17
    check_latents((over_latents, q, kv, rows), sizes)


def test_rows_behind_other_tokens_keep_the_others():
    sizes = LatentSizes(3, 16, 4)
    over_latents, q, kv, rows = latent_case([(0, 1), (40, 1), (20, 9)], sizes)
    want = attend_rows(over_latents, q[..., 12:], kv, rows, scale=0.1)
    over_latents, q = (torch.cat((torch.full((5, *x.shape[1:]), torch.nan), x)) for x in (over_latents, q))
    rows.q_starts, rows.num_tokens = rows.q_starts + 5, rows.num_tokens + 5
    for deterministic in (False, True):
        out = torch.full_like(over_latents, 7.0)
        attend_rows(over_latents, q[..., 12:], kv, rows, scale=0.1, deterministic=deterministic, out=out)
        assert (out[:5] == 7.0).all()
        torch.testing.assert_close(out[5:], want, rtol=0, atol=1e-5)


def test_deterministic_bits_depend_only_on_the_token():
    total, sizes = 560, LatentSizes(3, 16, 4)  # more than one segment of 512
    over_latents, q, kv, rows = latent_case([(0, total)], sizes)
    # The interpreter's products come from a BLAS, where a row's index in its tile may show. Here they are exact: scores
    # are integers, and in each tile at most one position has a latent.
    over_latents, q, kv = over_latents.round(), q.round(), kv.nan_to_num(7.0)
    positions = torch.arange(total)
    blocks = rows.tables[rows.slots[0], positions // 16].long()
    values = torch.zeros(total, sizes.rank + sizes.rope_dim)
    values[::32] = torch.randint(-3, 4, values[::32].shape).float()
    kv[0, 0, blocks, positions % 16] = values

    def attend(spans: list[tuple[int, int]]) -> torch.Tensor:
        tokens, part = rows_of(rows, spans)
        rope = q[tokens][..., 12:]
        return attend_rows(over_latents[tokens], rope, kv, part, scale=0.5, deterministic=True)

    want = attend([(500, 60)])
    for spans in ([(500, 7), (507, 53)], [(i, 1) for i in range(500, 560)], [(i, 2) for i in range(500, 560, 2)]):
        assert torch.equal(attend(spans), want)
    assert torch.equal(attend([(3, 5), (550, 10)])[5:], want[50:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("n", "deterministic"), [(5, False), (18, True), (64, False), (65, True)])
def test_the_store_norms_rotates_and_multiplies(n, deterministic, sizes, interleaved):
    torch.manual_seed(0)
    stored = sizes.rank + sizes.rope_dim
    table = rope_table(RopeSpec(), sizes.rope_dim, 64, torch.float32)
    positions, places = torch.randint(0, 64, (n,)), torch.randperm(5 * 16)[:n]
    q = torch.randn(n, sizes.num_heads * (sizes.nope_dim + sizes.rope_dim) + 8)[:, :-8]
    latents, norm = torch.randn(n, stored + 3)[:, 3:], torch.rand(sizes.rank)
    up = LatentUp(torch.randn(sizes.num_heads, sizes.nope_dim + 5, sizes.rank), sizes.nope_dim)
    results = []
    for store, rope in (
        (latent_store_torch, rope_rows_torch(table, positions)),
        (partial(latent_store_triton, deterministic=deterministic), rope_rows_triton(table, positions.int())),
    ):
        kv, own = torch.zeros(1, 1, 5, 16, stored), q.clone().view(n, sizes.num_heads, -1)
        queries = store(own, latents, rope, norm, 1e-6, kv, places.int(), interleaved, up)
        results.append((own, kv))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert (queries is None) == (n >= 64 and not deterministic)
    if queries is not None:
        torch.testing.assert_close(queries, head_product_torch(own[..., : sizes.nope_dim], up.keys_weight))


SPANS = [
    [(100, 1)],
    [(0, 1), (62, 1), (133, 1), (31, 1), (32, 1)],
    [(70, 3), (0, 3), (63, 3)],  # speculation
    [(40, 1), (7, 1), (33, 20), (0, 0)],
    [(1100, 2)],
]


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(("sizes", "value_dim"), [(LatentSizes(2, 80, 16), 9), (LatentSizes(20, 48, 8), 70)])
def test_merged_segments_are_multiplied(spans, sizes, value_dim, monkeypatch):
    """The same numbers with many segments, few of them and one."""
    _, q, kv, rows = latent_case(spans, sizes, dtype=torch.float16)
    generator = torch.Generator().manual_seed(2)
    q[..., : sizes.nope_dim] = torch.randn(q[..., : sizes.nope_dim].shape, generator=generator)
    shape = sizes.num_heads, sizes.nope_dim + value_dim, sizes.rank
    up = LatentUp((torch.randn(shape, generator=generator) / 6).half(), sizes.nope_dim)
    wide = torch.cat((torch.einsum("nhk,hkr->nhr", q[..., : sizes.nope_dim].double(), up.keys_weight.double()),
                      q[..., sizes.nope_dim :].double()), -1)  # fmt: skip
    mixed = paged_attention_torch(wide, kv.double().expand(2, *kv.shape[1:]), rows, scale=0.2).view(wide.shape)
    want = torch.einsum("nhr,hdr->nhd", mixed[..., : sizes.rank], up.values_weight.double()).flatten(1)
    fused = mock.Mock(wraps=latent_attention.merge_values_triton)
    monkeypatch.setattr(latent_attention, "merge_values_triton", fused)
    for num_sms, prefix_ready, short in ((64, True, True), (64, False, False), (4, True, True), (1, True, True)):
        rows.prefix_ready = prefix_ready
        monkeypatch.setattr(latent_attention, "num_sms", lambda _, count=num_sms: count)
        monkeypatch.setattr(latent_attention, "SHORT_RESULTS", short)
        for deterministic in (False, True):
            calls = fused.call_count
            got = latent_attention_triton(q, kv, PagedBatch(len(q), [rows]), up, scale=0.2, deterministic=deterministic)
            assert (got.double() - want).norm() < 3e-3 * want.norm()
            has_segments = rows.max_len > (512 if deterministic else 32)
            if num_sms != 4:
                assert (fused.call_count > calls) == (num_sms == 64 and has_segments)


def test_deterministic_values_do_not_depend_on_the_launches(monkeypatch):
    """One launch merges segments and multiplies, or two launches do the same."""
    sizes = LatentSizes(20, 48, 8)
    _, q, kv, rows = latent_case([(1200, 1)], sizes, dtype=torch.float16)
    q, generator = q.nan_to_num(0.5), torch.Generator().manual_seed(2)
    up = LatentUp((torch.randn(20, 12 + 70, 48, generator=generator) / 6).half(), 12)
    found = []
    for num_sms in (64, 2, 1):
        monkeypatch.setattr(latent_attention, "num_sms", lambda _, count=num_sms: count)
        found.append(latent_attention_triton(q, kv, PagedBatch(1, [rows]), up, scale=0.2, deterministic=True))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_parts_with_and_without_segments(monkeypatch):
    sizes, spans = LatentSizes(5, 32, 6), [(40, 1), (7, 1), (33, 20), (0, 15)]
    _, q, kv, rows = latent_case(spans, sizes, dtype=torch.float16)
    q[..., :12] = 0.5
    up = LatentUp((torch.randn(5, 30, 32) / 6).half(), 12)
    want = latent_attention_triton(q, kv, PagedBatch(len(q), [rows]), up, scale=0.2)
    monkeypatch.setattr(latent_attention, "num_sms", lambda _: 8)
    got = latent_attention_triton(q, kv, PagedBatch(len(q), parts_of(rows, 2)), up, scale=0.2)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("num_tokens", [0, 1, 17, 70, 130])
def test_products_of_heads(num_tokens):
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, 3, 50)[..., :36], torch.randn(3, 20, 36).transpose(1, 2)
    for deterministic in (False, True):
        torch.testing.assert_close(head_product_triton(x, weight, deterministic), head_product_torch(x, weight))
        half = head_product_triton(x.half(), weight.half(), deterministic).float()
        torch.testing.assert_close(half, head_product_torch(x, weight), rtol=2e-2, atol=2e-2)


def parts_of(rows: PagedRows, num_short: int) -> list[PagedRows]:
    """The first rows, which have one token, and the others."""
    if not num_short:
        return [rows]
    return [
        replace(rows, slots=rows.slots[own], starts=rows.starts[own], q_starts=edges, num_rows=size, num_tokens=tokens,
                max_count=most)
        for own, edges, size, tokens, most in (
            (slice(0, num_short), rows.q_starts[: num_short + 1], num_short, num_short, 1),
            (slice(num_short, None), rows.q_starts[num_short:], rows.num_rows - num_short, rows.num_tokens,
             rows.max_count),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("value_dim", [9, 18])
@pytest.mark.parametrize("spans", [[(0, 70)], [(40, 1), (7, 1), (33, 65), (0, 40)]])
def test_both_forms_of_prompts_are_equal(spans, value_dim, monkeypatch):
    """Two heads are expanded at a time. The table's entries behind the rows name no block."""
    sizes = LatentSizes(5, 32, 6)
    _, q, kv, rows = latent_case(spans, sizes)
    q[..., :12] = torch.randn_like(q[..., :12])
    up = LatentUp(torch.randn(5, 12 + value_dim, 32) / 6, 12)
    parts = parts_of(rows, sum(count == 1 for _, count in spans))
    plan = PagedBatch(len(q), parts)
    want = latent_attention_triton(q, kv, plan, up, scale=0.2)
    monkeypatch.setattr(latent_expanded, "_LEAST_TOKENS", 40)
    monkeypatch.setattr(
        latent_expanded, "MOST_EXPANDED", max(2 * 18, 38) * parts[-1].num_rows * -(-rows.max_len // 16) * 16
    )
    used = mock.Mock(wraps=latent_expanded.prefill_attention)
    monkeypatch.setattr(latent_expanded, "prefill_attention", used)
    got = latent_attention_triton(q, kv, plan, up, scale=0.2)
    assert used.call_count == 3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
