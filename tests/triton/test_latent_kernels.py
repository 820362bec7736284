"""Kernels of latent attention against their torch twins. (bf16 and graphs: tests/gpu/test_gpu_latent.py.)"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from runtime.kernels.attention import latent_attention, latent_expanded, segments
from runtime.kernels.attention.latent_attention import attend_rows, latent_attention_triton
from runtime.kernels.attention.latent_heads import head_product_torch, head_product_triton
from runtime.kernels.attention.latent_torch import LatentUp
from runtime.kernels.attention.paged_attention import AttentionForm, PagedBatch, paged_attention_torch
from tests.support.kernels.attention_cases import rows_of, without_hidden
from tests.support.kernels.latent_cases import LatentSizes, latent_case


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


def walks_of(spans: list[tuple[int, int]], sizes: LatentSizes, num_sms: int, monkeypatch, **case) -> list[int]:
    """Positions that each program walks over in a launch. Its results must equal plain attention."""
    walks, attend = [], latent_attention.attend_latents

    def attend_and_count(*args, **options):
        walks.append(int(args[6].handle.data.item() - args[5].handle.data.item()))
        return attend(*args, **options)

    monkeypatch.setattr(latent_attention, "attend_latents", attend_and_count)
    monkeypatch.setattr(latent_attention, "num_sms", lambda device: num_sms)
    over_latents, q, kv, rows = latent_case(spans, sizes, **case)
    rope = q[..., sizes.nope_dim :]
    want = paged_attention_torch(
        torch.cat((over_latents, rope), -1), kv.expand(2, *kv.shape[1:]), rows, AttentionForm(0.3)
    )
    got = attend_rows(over_latents, rope, kv, rows, scale=0.3)
    torch.testing.assert_close(got, want.unflatten(1, (sizes.num_heads, -1))[..., : sizes.rank], rtol=1e-4, atol=1e-5)
    return [walk for walk in walks if walk > 0]


@pytest.mark.parametrize(("num_short", "num_sms"), [(4, 20), (16, 33), (30, 8)])
def test_a_long_row_among_short_ones_has_most_segments(num_short, num_sms, monkeypatch):
    """One program walked over the whole row, or a few over large parts."""
    spans = [(60, 1)] * (num_short // 2) + [(2999, 1)] + [(40, 1)] * (num_short - num_short // 2)
    walks = walks_of(spans, LatentSizes(3, 16, 4), num_sms, monkeypatch)
    work = sum(start + count for start, count in spans)
    assert max(walks) <= 2 * work // num_sms + 16


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 20, 21, 40])
def test_equal_rows_have_as_many_segments_as_fit(num_rows, monkeypatch):
    walks = walks_of([(639, 1)] * num_rows, LatentSizes(3, 16, 4), 20, monkeypatch)
    assert len(walks) == num_rows * max(1, 20 // num_rows)


@pytest.mark.parametrize(
    ("spans", "heads", "padding"),
    [
        ([(0, 1), (1, 1), (0, 0), (1500, 1), (0, 0), (70, 1)], 3, 2),
        ([(0, 1), (1500, 3), (0, 0), (64, 2), (0, 1)], 5, 1),  # several tokens in a tile
        ([(0, 1), (1300, 1), (5, 1)], 40, 1),  # several tiles of heads
        ([(10, 8), (1300, 7), (0, 1)], 20, 0),  # several tiles of tokens
    ],
)
def test_rows_of_different_lengths(spans, heads, padding, monkeypatch):
    """The long row has more segments than are merged at a time."""
    walks = walks_of(spans, LatentSizes(heads, 20, 6), 150, monkeypatch, padding_rows=padding)
    assert max(walks) <= 112
    assert len(walks) > 32


def test_layers_share_segments_that_a_capture_finds_anew(monkeypatch):
    """A warm-up has found segments for other lengths."""
    launches = mock.MagicMock(wraps=segments._find_segments_kernel)
    launches.__getitem__.side_effect = segments._find_segments_kernel.__getitem__
    monkeypatch.setattr(segments, "_find_segments_kernel", launches)
    sizes = LatentSizes(3, 16, 4)
    over_latents, q, kv, rows = latent_case([(900, 1), (800, 1)], sizes)
    rope = q[..., sizes.nope_dim :]
    for is_captured, starts in ((False, (3, 800)), (True, (900, 40))):
        monkeypatch.setattr(segments, "_is_captured", lambda tensor, is_captured=is_captured: is_captured)
        rows.starts.copy_(torch.tensor(starts))
        fresh = replace(rows)
        assert not fresh.segments
        layers = [attend_rows(over_latents, rope, kv, rows, scale=0.3) for _ in range(2)]
        want = attend_rows(over_latents, rope, kv, fresh, scale=0.3)
        assert torch.equal(layers[0], want)
        assert torch.equal(layers[1], want)
    assert launches.__getitem__.call_count == 4


@pytest.mark.parametrize("num_tokens", [0, 1, 17, 70, 130])
def test_products_of_heads(num_tokens):
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, 3, 50)[..., :36], torch.randn(3, 20, 36).transpose(1, 2)
    for deterministic in (False, True):
        torch.testing.assert_close(head_product_triton(x, weight, deterministic), head_product_torch(x, weight))
        half = head_product_triton(x.half(), weight.half(), deterministic).float()
        torch.testing.assert_close(half, head_product_torch(x, weight), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("value_dim", [9, 18])
@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize("spans", [[(0, 70)], [(40, 1), (7, 1), (33, 65), (0, 40)]])
def test_both_forms_of_prompts_are_equal(spans, first_key, value_dim, monkeypatch):
    """Two heads are expanded at a time. The table's entries behind the rows name no block."""
    sizes = LatentSizes(5, 32, 6)
    spans = [(start + first_key, count) for start, count in spans]
    _, q, kv, rows = latent_case(spans, sizes)
    kv = without_hidden(kv, rows, 0, first_key)
    q[..., :12] = torch.randn_like(q[..., :12])
    up = LatentUp(torch.randn(5, 12 + value_dim, 32) / 6, 12)
    num_short = sum(count == 1 for _, count in spans)
    parts = [rows]
    if num_short:
        parts = [
            replace(rows, slots=rows.slots[own], starts=rows.starts[own], q_starts=edges, num_rows=size,
                    num_tokens=tokens, max_count=most)
            for own, edges, size, tokens, most in (
                (slice(0, num_short), rows.q_starts[: num_short + 1], num_short, num_short, 1),
                (slice(num_short, None), rows.q_starts[num_short:], len(spans) - num_short, len(q), 65),
            )
        ]  # fmt: skip
    plan = PagedBatch(len(q), parts)
    want = latent_attention_triton(q, kv, plan, up, 0.2, first_key)
    monkeypatch.setattr(latent_expanded, "_LEAST_TOKENS", 40)
    monkeypatch.setattr(
        latent_expanded, "MOST_EXPANDED", max(2 * 18, 38) * parts[-1].num_rows * -(-rows.max_len // 16) * 16
    )
    used = mock.Mock(wraps=latent_expanded.prefill_attention)
    monkeypatch.setattr(latent_expanded, "prefill_attention", used)
    got = latent_attention_triton(q, kv, plan, up, 0.2, first_key)
    assert used.call_count == 3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
