"""Paged attention kernels against their torch twin. (The interpreter lacks bf16: tests/gpu/test_gpu_attention.py.)"""

import importlib
from functools import partial

import pytest
import torch

from runtime.kernels.attention.decode_attention import decode_attention
from runtime.kernels.attention.paged_attention import AttentionForm, PagedRows, paged_attention_torch
from runtime.kernels.attention.prefill_attention import _find_segment, prefill_attention
from runtime.kernels.triton_language import jit, tl
from tests.support.kernels.attention_cases import check, paged_case, rows_of, sinks_of


def test_the_twin_is_softmax_over_each_tokens_past():
    q, kv, rows = paged_case([(37, 1), (0, 5), (20, 3)], dtype=torch.float64)
    got = paged_attention_torch(q, kv, rows, AttentionForm(0.1))
    tables, starts, edges = rows.tables.numpy(), rows.starts.tolist(), rows.q_starts.tolist()
    for row, slot in enumerate(rows.slots.tolist()):
        for token in range(edges[row], edges[row + 1]):
            seen = range(starts[row] + token - edges[row] + 1)
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


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("window", [1, 5, 64, 65, 128, 513])
@pytest.mark.parametrize("deterministic", [False, True])
def test_windows_of_long_rows_at_any_offset(count, window, deterministic):
    """The grid has only the segments that a window can reach, wherever it begins."""
    rows = [(start, count) for start in (511, 512, 575, 576, 639, 1023, 0)]
    for spans in (rows, rows[3:4], rows[5:6]):  # a single row has the most splits
        check(partial(decode_attention, deterministic=deterministic), paged_case(spans, (2, 1, 32)), window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "heads", [(2, 2, 64), (3, 1, 80), (4, 1, 96), (8, 1, 128), (2, 1, 256), (6, 2, 64), (8, 1, 512)]
)
def test_decode(heads, dtype):
    check(decode_attention, paged_case([(0, 1), (62, 1), (133, 1)], heads, dtype=dtype, padding_rows=1))


@pytest.mark.parametrize("count", range(1, 9))
def test_verify_rows(count):
    check(decode_attention, paged_case([(70, count), (0, count), (63, 1), (126, max(1, count - 1))], (3, 1, 64)))


def test_verify_rows_of_wide_heads_are_several_tiles():
    q, kv, rows = paged_case([(70, 5), (0, 3), (63, 1)], (8, 1, 320), dtype=torch.float16)
    rows.prefix_ready = True  # as in a graph: the cache is read before the previous kernel has ended
    check(decode_attention, (q, kv, rows))


@pytest.mark.parametrize("block_size", [3, 16, 256])
@pytest.mark.parametrize("options", [{}, {"window": 19}, {"window": 64, "soft_cap": 2.0}, {"soft_cap": 5.0}])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_blocks_window_and_soft_cap(block_size, options, has_sinks):
    options = options | ({"sinks": sinks_of(4)} if has_sinks else {})
    case = paged_case([(170, 2), (0, 1), (20, 1)], (4, 2, 64), block_size)
    check(decode_attention, case, scale=0.3, **options)
    case = paged_case([(130, 50), (0, 3), (20, 1)], (4, 2, 64), block_size)
    check(prefill_attention, case, scale=0.3, **options)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("heads", [(3, 1, 80), (4, 2, 64)])
def test_stored_values(kind, heads):
    q, kv, rows = paged_case([(70, 3), (0, 1), (133, 1)], heads, dtype=torch.float16)
    check(decode_attention, (q, kv, rows), kind, window=100)
    rows.prefix_ready = True
    check(decode_attention, (q, kv, rows), kind, soft_cap=3.0)
    check(decode_attention, (q, kv, rows), kind, sinks=sinks_of(heads[0]))
    check(prefill_attention, paged_case([(0, 3), (65, 33)], heads, dtype=torch.float32), kind, window=19)
    check(prefill_attention, paged_case([(65, 33)], heads), kind, window=19, sinks=sinks_of(heads[0]))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("options", [{}, {"window": 19, "soft_cap": 2.0}, {"window": 100, "sinks": sinks_of(3)}])
def test_settled_rows_within_a_window(count, options):
    q, kv, rows = paged_case([(70, count), (9, count), (140, count)], (3, 1, 64))
    rows.prefix_ready = True  # as in a graph: the cache is read before the previous kernel has ended
    check(decode_attention, (q, kv, rows), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2, 64), (3, 1, 80), (4, 1, 96), (8, 1, 128), (2, 1, 256), (4, 2, 512)])
def test_prefill(heads, dtype):
    check(prefill_attention, paged_case([(0, 71), (65, 33), (129, 1)], heads, dtype=dtype))


@pytest.mark.parametrize(
    ("spans", "options"),
    [
        ([(500, 9), (0, 5)], {}),
        ([(0, 0), (420, 20), (0, 1), (0, 0)], {}),
        ([(620, 9)], {"window": 300, "soft_cap": 3.0}),
        ([(620, 9), (3, 1)], {"sinks": sinks_of(4)}),
    ],
)
def test_few_new_tokens_behind_many(spans, options):
    """Their positions are cut into segments. The form for steps of many tokens, which cuts none, gives the same."""
    q, kv, rows = paged_case(spans, (4, 2, 64))
    for num_tokens in (rows.num_tokens, 2000):
        rows.num_tokens = rows.max_len = num_tokens
        check(prefill_attention, (q, kv, rows), **options)


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


@pytest.mark.parametrize("before", [1, 15, 16, 33])
def test_rows_behind_other_tokens_of_the_step(before):
    """The others' rows are not written, and the announced number of tokens may be too large."""
    q, kv, rows = paged_case([(0, 1), (40, 1), (0, 0), (20, 35), (129, 17)], (4, 2, 64))
    want = paged_attention_torch(q, kv, rows, AttentionForm(0.1))
    q = torch.cat((torch.full((before, *q.shape[1:]), torch.nan), q))
    rows.q_starts, rows.num_tokens = rows.q_starts + before, rows.num_tokens + before
    for deterministic in (False, True):
        out = torch.full((len(q), want.shape[1]), 7.0)
        prefill_attention(q, kv, rows, AttentionForm(0.1), deterministic=deterministic, out=out)
        assert (out[:before] == 7.0).all()
        torch.testing.assert_close(out[before:], want, rtol=0, atol=1e-5)


def test_the_length_bound_may_be_large_and_launches_repeat():
    q, kv, rows = paged_case([(40, 1), (150, 1)], (4, 1, 64), padding_rows=1)
    rows.max_len = 1 << 17
    for _ in range(3):  # the counters of arrivals are zero again after each
        check(decode_attention, (q, kv, rows))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_deterministic_bits_depend_only_on_the_token(window, has_sinks):
    total, heads = 560, (3, 1, 64)  # more than one segment of 512
    q, kv, rows = paged_case([(0, total)], heads)
    # The interpreter's products come from a BLAS, where a row's index in its tile may show. Here they are exact: scores
    # are integers, and in each tile at most one position has a value in a given dimension.
    q, kv = q.round(), kv.nan_to_num(7.0)
    kv[0].round_()
    places = torch.arange(total)
    index = rows.tables[rows.slots[0], places // 16].long(), places % 16
    kv[1][:, *index] *= torch.eye(64)[places % 64]
    form = AttentionForm(0.125, window, sinks=sinks_of(3) if has_sinks else None)

    def attend(kernel, spans: list[tuple[int, int]], settled: bool = False) -> torch.Tensor:
        tokens, part = rows_of(rows, spans)
        part.prefix_ready = settled
        return kernel(q[tokens], kv, part, form, deterministic=True)

    want = attend(decode_attention, [(550, 8)])
    assert torch.equal(attend(prefill_attention, [(508, 52)])[42:50], want)
    assert torch.equal(attend(decode_attention, [(i, 1) for i in range(550, 558)]), want)
    assert torch.equal(attend(decode_attention, [(550, 8)], settled=True), want)
    assert torch.equal(attend(decode_attention, [(3, 1), (554, 4), (40, 7)])[1:5], want[4:])
    for i in (0, 5):
        assert torch.equal(attend(decode_attention, [(550 + i, 1)]), want[i : i + 1])
    short = attend(prefill_attention, [(0, 30)])
    assert torch.equal(attend(prefill_attention, [(0, 7), (7, 23)]), short)
    assert torch.equal(attend(decode_attention, [(i, 1) for i in range(30)]), short)
