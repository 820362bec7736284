"""The rows of a step as one array: the input that a graph of any size gets for a plan, and the sizes that exist."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from runtime.core.plan import StepPlan, last_tokens
from runtime.worker.gpu.graph_runner import GraphRunner, piece_sizes, prefill_sizes
from runtime.worker.gpu.step_rows import MixedShape, cut, token_offsets

NULL_SLOT = 9


def plan_of(*rows: tuple[int, int, int, int]) -> StepPlan:
    """Rows are slot, first position, tokens, samples."""
    return StepPlan(0, None, [], None, *np.array(rows, np.int32).T.copy())


PLAN = plan_of((4, 30, 5, 0), (2, 7, 1, 1), (0, 0, 3, 3), (5, 11, 1, 1), (7, 2, 2, 1))


def tokens_of(shape: MixedShape, plan: StepPlan) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """(slot, position) of each token of the packed rows, and its samples."""
    slots, starts, q_starts, sampled, sampled_slots, positions = (
        part.tolist() for part in shape.split(shape.pack(plan, NULL_SLOT))
    )
    tokens = []
    for slot, start, first, end in zip(slots, starts, q_starts, q_starts[1:], strict=False):
        assert first == len(tokens)
        tokens += [(slot, start + i) for i in range(end - first)]
    return tokens, list(zip(sampled, sampled_slots, positions, strict=True))


@pytest.mark.parametrize(
    "shape",
    [
        MixedShape.of(PLAN),
        MixedShape(12, 2, 4, 6, 12, 99),
        MixedShape(20, 2, 4, 6, 20, 99),
        MixedShape(64, 8, 9, 30, 64, 99),
    ],
)
def test_rows_samples_and_padding(shape):
    tokens, samples = tokens_of(shape, PLAN)
    rows = {slot: (start, count) for slot, start, count in [(2, 7, 1), (5, 11, 1), (4, 30, 5), (0, 0, 3), (7, 2, 2)]}
    own = [(slot, start + i) for slot, (start, count) in rows.items() for i in range(count)]
    assert tokens[:12] == own, "rows of one token come first"
    assert tokens[12:] == [(NULL_SLOT, i) for i in range(shape.num_tokens - 12)]
    wanted = [(2, 8), (0, 1), (0, 2), (0, 3), (5, 12), (7, 4)]
    assert [(slot, position) for _, slot, position in samples[:6]] == wanted, "in the plan's order"
    for at, slot, position in samples[:6]:
        assert tokens[at] == (slot, position - 1)
    assert samples[6:] == [(0, NULL_SLOT, 0)] * (shape.num_samples - 6)
    slots, _, q_starts, *_ = shape.split(shape.pack(PLAN, NULL_SLOT))
    assert q_starts[2] == q_starts[shape.num_short] == 2, "short rows that are not there have no tokens"
    assert (slots[2 : shape.num_short] == NULL_SLOT).all()
    assert shape.sample_places(PLAN).tolist() == list(range(6))


def test_offsets_are_of_the_plans_rows():
    tokens, _ = tokens_of(MixedShape.of(PLAN), PLAN)
    for slot, start, offset in zip(PLAN.slots, PLAN.num_computed, token_offsets(PLAN), strict=True):
        assert tokens[offset + start] == (slot, start)


def test_a_graph_keeps_a_row_for_padding():
    own = MixedShape.of(PLAN)
    assert own == (12, 2, 3, 6, 5, 35)
    assert not own.has_room(own)
    assert own._replace(num_long=4).has_room(own)
    for less in ({"num_tokens": 11}, {"num_short": 1}, {"num_samples": 5}, {"num_long": 3}):
        assert not own._replace(**{"num_long": 4} | less).has_room(own), less


def test_graph_sizes_are_close_to_each_other():
    sizes = prefill_sizes(4096)
    assert sizes[:12] == [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024] == prefill_sizes(1024)
    assert sizes[-2:] == [2048, 4096]
    for size, following in pairwise(sizes[3:-1]):
        assert following <= size * (9 if size >= 1024 else 10) / 8
    assert prefill_sizes(100) == [64, 100]
    assert prefill_sizes(64) == [64]
    assert prefill_sizes(10) == [10]
    assert prefill_sizes(0) == []


def test_large_steps_have_little_padding():
    sizes = prefill_sizes(4096)
    for num_tokens in range(1, 8193):
        *full, rest = pieces = piece_sizes(num_tokens, sizes)
        assert sum(pieces) == num_tokens
        assert set(full) <= set(sizes)
        assert any(0 <= size - rest <= 128 for size in sizes)
        assert len(pieces) <= 4
        assert min(pieces) >= min(num_tokens, 512)
    assert piece_sizes(2048, sizes) == [2048]
    assert piece_sizes(3000, sizes) == [2048, 952]
    assert piece_sizes(8192, sizes) == [4096, 4096]
    for few in ([], [100], [16, 24, 40], [512, 2048]):
        for num_tokens in (1, 15, 16, 41, 700, 2600, 5000):
            assert sum(pieces := piece_sizes(num_tokens, few)) == num_tokens
            assert min(pieces) > 0


@pytest.mark.parametrize("sizes", [(1, 11), (4, 4, 4), (7, 5), (2, 1, 1, 1, 7), (12,)])
def test_pieces_compute_and_sample_as_the_plan(sizes):
    """The order is the plan's: a row that is cut continues in the next piece, and samples where it did."""
    pieces = cut(PLAN, sizes)
    assert [int(piece.num_tokens.sum()) for piece in pieces] == list(sizes)
    tokens, samples = [], []
    for piece in pieces:
        sampling, after = last_tokens(piece, piece.num_samples)
        samples += zip(piece.slots[sampling].tolist(), after.tolist(), strict=True)
        for slot, start, count in zip(piece.slots, piece.num_computed, piece.num_tokens, strict=True):
            tokens += [(slot, position) for position in range(start, start + count)]
    rows = [(4, 30, 5), (2, 7, 1), (0, 0, 3), (5, 11, 1), (7, 2, 2)]
    assert tokens == [(slot, start + i) for slot, start, count in rows for i in range(count)]
    assert samples == [(2, 7), (0, 0), (0, 1), (0, 2), (5, 11), (7, 3)]


@pytest.mark.parametrize(("num_slots", "max_model_len"), [(1, 64), (4, 1000), (256, 4096), (1000, 2048)])
def test_every_bucket_fits_into_a_graphs_input(num_slots, max_model_len):
    runner = GraphRunner(torch.zeros(8, dtype=torch.int32), num_slots, max_model_len, 16)
    for bucket in runner.prefill_shapes(8192):
        assert bucket.num_tokens <= max_model_len, "padding has positions"
        assert bucket.num_ints <= len(runner.rows)
        assert bucket.num_samples <= runner.graph_io.output_ring.shape[1]
        assert runner.graph_io.has_room(bucket.num_ints, [np.zeros(2048, np.int32)])
