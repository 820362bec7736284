"""Compiled attention: its values, a token's bits in any batch, and the isolation of faults."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.cpu.attention.stored_numbers import LANES
from runtime.kernels.cpu.attention.tiled_rows import TILE, attention_tiles
from tests.support.kernels.cached_rows import Layer, rows_of
from tests.support.kernels.compiled import targets

LAYERS = {
    "float32": Layer(),
    "small heads": Layer(head_dim=8, group=1, num_kv_heads=3, block_size=1),
    "tail": Layer(head_dim=24, group=3, num_kv_heads=1, block_size=100),
    "window": Layer(head_dim=80, group=5, block_size=32, window=20),
    "window of itself": Layer(head_dim=16, window=1),
    "soft cap": Layer(head_dim=256, group=4, num_kv_heads=1, soft_cap=2.0, window=70, block_size=24),
    "wide": Layer(head_dim=512, group=8, num_kv_heads=1),
    "wide, int8": Layer(torch.int8, head_dim=512, group=4, num_kv_heads=1),
    "sinks": Layer(head_dim=64, group=8, num_kv_heads=1, window=128, has_sinks=True),
    "sinks, soft cap": Layer(head_dim=24, group=3, soft_cap=3.0, window=20, has_sinks=True),
    "sinks, int8": Layer(torch.int8, group=2, has_sinks=True),
    "sinks, e4m3": Layer(torch.float8_e4m3fn, head_dim=36, group=4, has_sinks=True),
    "bfloat16": Layer(torch.bfloat16, head_dim=128, group=2, block_size=16),
    "float16": Layer(torch.float16, head_dim=20, group=7, num_kv_heads=1, block_size=4),
    "int8": Layer(torch.int8, group=3, window=33),
    "int8 tail": Layer(torch.int8, head_dim=40, block_size=7),
    "e4m3": Layer(torch.float8_e4m3fn, group=4),
    "e4m3 tail": Layer(torch.float8_e4m3fn, head_dim=36, block_size=64, soft_cap=5.0),
}
EACH_LAYER = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
FEW_LAYERS = pytest.mark.parametrize(
    "layer", [LAYERS[name] for name in ("float32", "window", "int8", "e4m3 tail", "sinks")]
)
ROWS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=4)


@EACH_LAYER
@given(rows=ROWS, seed=st.integers(0, 99), parts=st.integers(1, 5), by_head=st.booleans())
@settings(max_examples=12)
def test_values_equal_those_of_the_twin(layer, rows, seed, parts, by_head):
    case = rows_of(layer, *map(list, zip(*rows, strict=True)), seed=seed)
    got, want = case.attend(parts=parts, by_head=by_head), case.expected()
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6 * float(want.abs().max()))


@EACH_LAYER
@given(rows=ROWS, seed=st.integers(0, 99), tile=st.integers(1, TILE), data=st.data())
@settings(max_examples=12)
def test_bits_depend_on_the_token_alone(layer, rows, seed, tile, data):
    case = rows_of(layer, *map(list, zip(*rows, strict=True)), seed=seed)
    whole = case.attend()
    assert torch.equal(whole, case.attend(parts=3, tile=tile, by_head=True))
    other_blocks = rows_of(replace(layer, block_size=data.draw(st.sampled_from([16, 24]))), *map(
        list, zip(*rows, strict=True)), seed=seed, spread=True)  # fmt: skip
    assert torch.equal(whole, other_blocks.attend())
    row = data.draw(st.integers(0, len(rows) - 1))
    first = data.draw(st.integers(0, rows[row][1] - 1))
    count = data.draw(st.integers(1, rows[row][1] - first))
    at = int(case.counts[:row].sum()) + first
    assert torch.equal(whole[at : at + count], case.own(row, first, count).attend())
    assert torch.equal(whole[at : at + 1], case.own(row, first, 1).attend())


@EACH_LAYER
def test_each_instruction_set_gives_the_same_bits(layer):
    case = rows_of(layer, [0, 130, 63], [37, 1, 6])
    first, *others = [case.attend(target) for target in targets()]
    assert all(torch.equal(first, other) for other in others)


@FEW_LAYERS
def test_faults_stay_with_their_token(layer):
    case = rows_of(layer, [0, 90], [35, 3])
    whole = case.attend()
    case.q[20, 1, 3] = torch.nan
    got = case.attend()
    assert not got[20].isfinite().all()
    assert torch.equal(got[np.r_[:20, 21:38]], whole[np.r_[:20, 21:38]])


@FEW_LAYERS
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_faults_of_keys_and_values_stay_with_their_readers(layer, part, fault):
    case, position = rows_of(layer, [0, 90], [35, 3]), 18
    whole = case.attend()
    block, offset = int(case.tables[0, position // layer.block_size]), position % layer.block_size
    if layer.dtype == torch.int8:
        case.scales[0, block, offset, part] = fault
    else:
        case.kv[part, 0, block, offset, 5] = torch.nan if layer.dtype == torch.float8_e4m3fn else fault
    got = case.attend()
    reads = np.zeros(38, bool)
    reads[position : min(35, position + layer.window) if layer.window else 35] = True
    assert torch.equal(got[~reads], whole[~reads])
    if part or fault is torch.nan:  # a key may be infinitely far from a query
        assert not got[reads].isfinite().all(1).any()


def test_scores_may_be_of_any_size():
    case = rows_of(Layer(), [0, 100], [20, 2])
    case.q *= 1e4
    want = case.expected()
    torch.testing.assert_close(case.attend().double(), want, rtol=1e-3, atol=1e-3)


def test_tiles_cover_each_token_once():
    starts, counts, rows = (np.array(x, np.int32) for x in ([5, 0, 9, 100], [1, 40, 17, 16], [3, 0, 2, 1]))
    tiles = attention_tiles(starts, counts, rows)
    assert TILE == LANES
    covered = {}
    for first, count, row, position in tiles.tolist():
        assert 1 <= count <= TILE
        covered |= {first + i: (row, position + i) for i in range(count)}
    each = zip(starts, counts, rows, strict=True)
    want = [(row, start + i) for start, count, row in each for i in range(count)]
    assert [covered[token] for token in range(len(covered))] == want
