"""The twin of paged attention, and the grids of its kernels. (Their values and bits: tests/kernels.)"""

import importlib

import pytest
import torch

from runtime.kernels.attention.paged_attention import AttentionForm, PagedRows, paged_attention_torch
from runtime.kernels.attention.prefill_attention import _find_segment, prefill_attention
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


@jit
def _find_segments(q_starts_ptr, starts_ptr, out_ptr, num_rows, PROGRAMS: tl.constexpr, WINDOW: tl.constexpr):
    place = tl.program_id(0)
    found = _find_segment(q_starts_ptr, starts_ptr, place, num_rows, 16, 256, PROGRAMS, 128, WINDOW, 32)
    for i in tl.static_range(4):
        tl.store(out_ptr + place * 4 + i, found[i])


@pytest.mark.parametrize("window", [0, 500])
@pytest.mark.parametrize("num_programs", [3, 8, 33])
@pytest.mark.parametrize("spans", [[(0, 40)], [(14000, 128)], [(0, 0), (5000, 20), (0, 17), (900, 3), (0, 0)]])
def test_segments_cover_the_tiles(spans, num_programs, window):
    starts, counts = torch.tensor(spans, dtype=torch.int32).T.contiguous()
    q_starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    num_tiles = sum(-(-count // 16) for _, count in spans)
    out = torch.empty((max(num_programs, num_tiles) + 40, 4), dtype=torch.int32)
    _find_segments[(len(out),)](q_starts, starts, out, len(spans), num_programs, window)
    used = [line for line in out.tolist() if line[1] * 16 < spans[line[0]][1]]
    assert used == out[: len(used)].tolist(), "places that are not needed are the last ones"
    assert len(used) <= max(num_programs, num_tiles)
    tiles: dict[tuple[int, int], list[int]] = {}
    for row, tile, segment, segment_len in used:
        tiles.setdefault((row, tile), []).append(segment)
        start, count = spans[row]
        walk = min(start + count, window + 16 + 32) if window else start + count
        num_segments = -(-walk // segment_len)
        assert segment < num_segments
        assert segment_len % 32 == 0
        assert walk - (num_segments - 1) * segment_len >= segment_len - 32 * num_segments, "they are equally long"
    assert len(tiles) == num_tiles
    assert all(segments == list(range(len(segments))) for segments in tiles.values())
    if spans == [(14000, 128)] and num_programs == 33:
        assert len(used) == 32
