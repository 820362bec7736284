"""The twin of paged attention, and the grids of its kernels. (Their values and bits: tests/kernels.)"""

import importlib
from typing import NamedTuple

import pytest
import torch

from runtime.kernels.attention.decode_attention import decode_attention
from runtime.kernels.attention.paged_attention import AttentionForm, PagedRows, paged_attention_torch
from runtime.kernels.attention.prefill_attention import _pieces, prefill_attention
from runtime.kernels.attention.segments import arrival_counters, find_segment
from runtime.kernels.triton_language import jit, tl
from tests.support.kernels.attention_cases import paged_case, without_hidden


@pytest.mark.parametrize("first_key", [0, 1])
def test_the_twin_is_softmax_over_each_tokens_past(first_key):
    q, kv, rows = paged_case([(37, 1), (first_key, 5), (20, 3)], dtype=torch.float64)
    kv = without_hidden(kv, rows, 0, first_key)
    got = paged_attention_torch(q, kv, rows, AttentionForm(0.1, first_key=first_key))
    tables, starts, edges = rows.tables.numpy(), rows.starts.tolist(), rows.q_starts.tolist()
    for row, slot in enumerate(rows.slots.tolist()):
        for token in range(edges[row], edges[row + 1]):
            seen = range(first_key, starts[row] + token - edges[row] + 1)
            k, v = (torch.stack([x[:, tables[slot, p // 16], p % 16] for p in seen], 1) for x in kv)
            for head in range(4):
                weights = (k[head // 2] @ q[token, head] * 0.1).softmax(0)
                torch.testing.assert_close(got[token, head * 64 : head * 64 + 64], weights @ v[head // 2])


def test_the_grid_of_a_long_prompt_fits_devices(monkeypatch):
    """A device takes at most 65,535 places in all dimensions of a grid but the first."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    module = importlib.import_module(
        "runtime.kernels.attention.prefill_attention"
    )  # the package has the function by that name
    monkeypatch.setattr(module, "_prefill_attention_kernel", Kernel())
    monkeypatch.setattr(module, "use_pdl", lambda q: False)
    q = torch.empty((1 << 17, 32, 64), device="meta")
    ids = torch.empty(2, dtype=torch.int32, device="meta")
    rows = PagedRows(ids[:1], ids[:1], ids, ids.view(1, 2), 1, 1 << 17, 1 << 17, 1 << 17)
    prefill_attention(q, torch.empty((2, 2, 9000, 16, 64), device="meta"), rows, AttentionForm(1.0))
    ((places, *others),) = grids
    assert places >= 2 * (1 << 17) // 2
    assert all(size <= 65_535 for size in others)


class _Form(NamedTuple):
    """What `find_segment` reads of a kernel's constants."""

    window: int = 0
    tile_tokens: int = 16
    num_rows: int = 64
    block_n: int = 32
    least_segment: int = 128


@jit
def _find_segments(
    q_starts_ptr, starts_ptr, out_ptr, num_rows, num_slots, pieces, FORM: tl.constexpr, HAS_PIECES: tl.constexpr
):
    place = tl.program_id(0)
    found = find_segment(q_starts_ptr, starts_ptr, place, num_rows, num_slots, pieces, FORM, HAS_PIECES)
    for i in tl.static_range(4):
        tl.store(out_ptr + place * 4 + i, found[i])


def _segments(spans: list[tuple[int, int]], num_slots: int, pieces: int, form: _Form) -> list[list[int]]:
    """(row, tile, segment, positions per segment) in each program that is needed."""
    starts, counts = torch.tensor(spans, dtype=torch.int32).T.contiguous()
    q_starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    num_tiles = sum(-(-count // form.tile_tokens) for _, count in spans)
    num_places = num_tiles * pieces or num_tiles + num_slots
    out = torch.empty((num_places + 20, 4), dtype=torch.int32)
    _find_segments[(len(out),)](q_starts, starts, out, len(spans), num_slots, pieces, form, pieces > 0)
    used = [line for line in out.tolist() if line[1] * form.tile_tokens < spans[line[0]][1]]
    assert used == out[: len(used)].tolist(), "places that are not needed are the last ones"
    assert len(used) <= num_places
    return used


@pytest.mark.parametrize("window", [0, 500])
@pytest.mark.parametrize(("num_slots", "pieces"), [(3, 0), (33, 0), (0, 3)])
@pytest.mark.parametrize("spans", [[(0, 40)], [(14000, 128)], [(0, 0), (5000, 20), (0, 17), (900, 3), (0, 0)]])
def test_segments_cover_the_tiles(spans, num_slots, pieces, window):
    tiles: dict[tuple[int, int], list[int]] = {}
    for row, tile, segment, segment_len in _segments(spans, num_slots, pieces, _Form(window)):
        tiles.setdefault((row, tile), []).append(segment)
        start, count = spans[row]
        walk = min(start + count, window + 16 + 32) if window else start + count
        num_segments = -(-walk // segment_len)
        assert segment < num_segments
        assert segment_len % 32 == 0
        assert walk - (num_segments - 1) * segment_len >= segment_len - 32 * num_segments, "they are equally long"
    assert len(tiles) == sum(-(-count // 16) for _, count in spans)
    assert all(segments == list(range(len(segments))) for segments in tiles.values())


@pytest.mark.parametrize("spans", [[(17_499, 1)], [(90, 1), (17_999, 1)]])
def test_groups_of_segments_are_merged_in_turn(monkeypatch, spans):
    """More than SEGMENTS segments in a row need many programs at a time."""
    module = importlib.import_module("runtime.kernels.attention.decode_attention")
    monkeypatch.setattr(module, "num_sms", lambda device: 40)
    q, kv, rows = paged_case(spans, dtype=torch.float32)
    got = decode_attention(q, kv, rows, AttentionForm(0.1))
    torch.testing.assert_close(got, paged_attention_torch(q, kv, rows, AttentionForm(0.1)))
    assert not arrival_counters(q.device).any()


@pytest.mark.parametrize("length", [701, 1901, 3000, 5000])
def test_segments_of_one_row_are_whole_tiles(monkeypatch, length):
    """Positions that two segments shared counted twice."""
    module = importlib.import_module("runtime.kernels.attention.decode_attention")
    monkeypatch.setattr(module, "num_sms", lambda device: 132)
    q, kv, rows = paged_case([(length - 1, 1)], (4, 2, 16), dtype=torch.float32)
    got = decode_attention(q, kv, rows, AttentionForm(0.1))
    torch.testing.assert_close(got, paged_attention_torch(q, kv, rows, AttentionForm(0.1)))


@pytest.mark.parametrize(("num_short", "num_slots"), [(16, 66), (40, 49), (48, 49), (60, 20)])
def test_a_long_row_among_short_ones_has_most_segments(num_short, num_slots):
    """One program walked over the whole row, or a few over large parts."""
    spans = [(1200, 1)] * (num_short // 2) + [(71_999, 1)] + [(1200, 1)] * (num_short - num_short // 2)
    used = _segments(spans, num_slots, 0, _Form(tile_tokens=1))
    work = sum(start + count for start, count in spans)
    assert max(line[3] for line in used) <= max(2 * work // num_slots, 512) + 32


def test_equal_rows_have_as_many_segments_as_fit():
    for num_rows in (5, 9, 20, 21, 40):
        used = _segments([(4799, 1)] * num_rows, 20, 0, _Form(tile_tokens=1))
        assert len(used) == num_rows * max(1, 20 // num_rows)


def test_pieces_of_tiles_fill_the_waves():
    for num_tiles in range(1, 600):
        pieces = _pieces(num_tiles, 132)
        waves = -(-num_tiles * pieces // 132) / pieces
        assert num_tiles * pieces <= max(4 * 132, num_tiles)
        assert waves <= max(1.5 * num_tiles / 132, 1 / 16)
