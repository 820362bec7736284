"""Steps with prompts as graphs: a replay computes the same as the launched plan, in every bucket."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from runtime.base.model.pooling import Pooling
from runtime.base.types import SamplingParams
from runtime.features.pooler import Pooler
from runtime.worker.gpu.step_rows import MixedShape
from runtime.worker.runner import ModelRunner
from tests.support.kernels.triton_engine import SHALLOW, replayed_graphs
from tests.support.models.runner_driver import GREEDY, Driver, tiny_runner
from tests.support.models.specs import changed

SPEC = changed(SHALLOW, hidden_size=64, num_heads=2, ffn_size=64)
HOT = SamplingParams(max_tokens=60, temperature=1.0)
PENALISED = SamplingParams(max_tokens=60, temperature=0.0, repetition_penalty=1.5, logprobs=2)


SIZES = (16, 24, 40)


@pytest.fixture(scope="module")
def runner():
    config = {"kernel_backend": "triton", "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4}
    with pytest.MonkeyPatch.context() as patch:
        # Other tests cover products of few rows, which take minutes under the interpreter.
        patch.setattr("runtime.kernels.linear.fused_linear.MAX_ROWS", 0)
        patch.setattr("runtime.worker.gpu.graph_runner.prefill_sizes", lambda most: [n for n in SIZES if n <= most])
        # Memory that is allocated and not written is NaN, or the largest integer.
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield tiny_runner(SPEC, max_model_len=160, max_num_batched_tokens=160, **config)
        torch.use_deterministic_algorithms(False)


def prompt(length: int, salt: int = 0) -> list[int]:
    return np.random.default_rng([length, salt]).integers(0, SPEC.vocab_size, length).tolist()


def without_graphs(runner) -> Driver:
    runner.steps.graph_runner.graphs.clear()
    runner.steps.graph_runner.prefill_graphs.clear()
    return Driver(runner)


def mixed_step(driver: Driver, num_tokens: int, num_decoding: int) -> tuple[torch.Tensor, ...]:
    """Token ids, logits and state after a step of `num_tokens` tokens: decode rows, a chunk behind another's prefix,
    and a new prompt."""
    shared = prompt(17)
    rows = []
    driver.open(0, shared)
    driver.step((0, 0, 17, 1))
    if num_decoding > 1:
        driver.open(1, prompt(5), HOT, seed=3)
        driver.step((1, 0, 5, 1))
    rows += [(0, 17, 1, 1), (1, 5, 1, 1)][:num_decoding]
    chunk = num_tokens // 3
    table = driver.tables[0][:1]  # its first 16 tokens are another's
    driver.open(2, [*shared[:16], *prompt(chunk + 9)], shared=table)
    rows.append((2, 16, chunk, 0))
    rest = num_tokens - chunk - num_decoding
    driver.open(3, prompt(rest, salt=1), PENALISED if num_tokens % 2 else HOT, seed=4)
    rows.append((3, 0, rest, 1))
    rows = rows[::-1] if num_tokens % 4 == 0 else rows
    result = driver.step(*rows)
    steps = driver.runner.steps
    kept = [torch.from_numpy(result.token_ids), driver.logits.float(), torch.from_numpy(result.logprobs)]
    for slot, start, count, sampled in rows:
        kept.append(steps.slots.tokens[slot, : start + count + sampled].clone())
        blocks = torch.tensor(driver.tables[slot])
        kv = steps.cache.layers[0].values[:, :, blocks].flatten(2, 3)[:, :, : start + count]
        kept.append(kv.clone())
    assert torch.isfinite(steps.cache.layers[0].values[:, :, 0]).all(), "padding leaves the null block finite"
    return tuple(kept)


# Each graph, with two of its four short rows or without them; and one with one of them.
@pytest.mark.parametrize(("tokens", "num_decoding"), [*((size, n) for size in SIZES for n in (0, 2)), (24, 1)])
@pytest.mark.thorough
def test_every_bucket_at_its_edges(runner, tokens, num_decoding):
    for num_tokens in (tokens - 1, tokens, tokens + 1):
        want = mixed_step(without_graphs(runner), num_tokens, num_decoding)
        driver = without_graphs(runner)
        replays = replayed_graphs(runner.steps, *runner.steps.graph_runner.prefill_shapes(160))
        assert len(replays) == 2 * len(SIZES)
        got = mixed_step(driver, num_tokens, num_decoding)
        best = next((size for size in SIZES if size >= num_tokens), None)
        used = [r.count for r in replays if r.shape[:2] == (best, 4 * bool(num_decoding))]
        assert used == ([] if best is None else [1]) or used == [2], "the graph of the steps before may be the same"
        if best is None:  # it is several graphs, which do not keep logits
            want, got = (want[0], *want[2:]), (got[0], *got[2:])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("params", [HOT, replace(PENALISED, logit_bias=((3, 30.0),))])
@pytest.mark.thorough
def test_a_step_above_the_largest_graph_is_split(runner, monkeypatch, params):
    """Each row continues where the last piece left it, and all samples come in the plan's order. The rows are guesses,
    decode rows, and a request that shares blocks which an earlier piece of the same step computes. Samples may be read
    again, with the logits of their own piece."""

    def step(driver: Driver) -> list[torch.Tensor]:
        first = prompt(50)
        driver.open(0, prompt(9), HOT, seed=1)
        driver.step((0, 0, 9, 1))
        driver.open(1, first, GREEDY)
        driver.open(2, [*first[:48], *prompt(9, salt=2)], params, shared=driver.tables[1][:3], seed=4)
        driver.plan.draft_lens = np.array([2, 0, 0], np.int32)
        driver.plan.draft_token_ids = np.array([5, 6], np.int32)
        result = driver.step((0, 9, 3, 3), (1, 0, 50, 1), (2, 48, 9, 1))
        kept = [torch.from_numpy(result.token_ids), driver.runner.steps.slots.tokens[:3, :58].clone()]
        kept.append(torch.from_numpy(result.logprobs))
        for slot, length in ((0, 12), (1, 50), (2, 57)):
            blocks = torch.tensor(driver.tables[slot])
            kept.append(driver.runner.steps.cache.layers[0].values[:, :, blocks].flatten(2, 3)[:, :, :length].clone())
        return kept

    want = step(without_graphs(runner))
    monkeypatch.setattr("runtime.worker.gpu.graph_runner._LEAST_REST", 1)
    driver = without_graphs(runner)
    replays = replayed_graphs(runner.steps, MixedShape(16, 2, 4, 6, 16, 160), MixedShape(40, 2, 4, 6, 40, 160))
    got = step(driver)
    assert [replay.count for replay in replays] == [1, 2], "9 tokens, and 62 in pieces of 40 and 22"
    assert len(want[0]) == 5
    assert (want[0][4] == 3) == (params is not HOT)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.thorough
def test_penalties_of_a_request_that_resumes(runner):
    """A graph's own input brings the tokens that its penalties are for."""
    everything = SamplingParams(temperature=0.0, repetition_penalty=3.0, presence_penalty=2.0, frequency_penalty=2.0)
    known = [7, 7, 9, *prompt(20), 7, 9]

    def tokens(driver: Driver, params: SamplingParams) -> list[int]:
        sampled = []
        for length in range(20, 26):
            driver.open(0, known[:length], params, prompt_len=4, seed=1)
            driver.step((0, 0, length, 1))
            sampled.append(int(driver.runner.steps.slots.tokens[0, length]))
            driver.free(0)
        return sampled

    want = tokens(without_graphs(runner), everything)
    assert want != tokens(without_graphs(runner), GREEDY)
    driver = without_graphs(runner)
    replays = replayed_graphs(runner.steps, *runner.steps.graph_runner.prefill_shapes(160))
    assert tokens(driver, everything) == want
    assert sum(r.count for r in replays) == len(want)


def test_rows_of_guesses_beside_a_prompt(runner):
    """Their samples are several a row; places that the plan does not use stay the null slot's."""

    def step(driver: Driver) -> list[torch.Tensor]:
        driver.open(0, prompt(9), HOT, seed=1)
        driver.step((0, 0, 9, 1))
        driver.open(1, prompt(21, salt=2), GREEDY)
        driver.plan.draft_lens = np.array([2, 0], np.int32)
        driver.plan.draft_token_ids = np.array([5, 6], np.int32)
        result = driver.step((0, 9, 3, 3), (1, 0, 21, 1))
        return [torch.from_numpy(result.token_ids), driver.runner.steps.slots.tokens[:2, :24].clone()]

    want = step(without_graphs(runner))
    driver = without_graphs(runner)
    (replay,) = replayed_graphs(runner.steps, MixedShape(32, 2, 4, 6, 32, 160))
    got = step(driver)
    assert replay.count == 2
    assert len(want[0]) == 4
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_steps_without_a_fitting_graph_are_launched(runner, monkeypatch):
    """Rule by rule: tokens for too many pieces, short rows, long rows, samples; a prompt that is scored; a plan of
    several steps."""
    monkeypatch.setattr("runtime.worker.gpu.graph_runner.MAX_PIECES", 1)
    driver = without_graphs(runner)
    (replay,) = replayed_graphs(runner.steps, MixedShape(16, 1, 2, 2, 16, 160))
    for slot in range(4):
        driver.open(slot, prompt(20, salt=slot))
    for rows in (
        [(0, 0, 17, 1)],
        [(0, 17, 1, 0), (1, 0, 1, 0)],
        [(0, 18, 2, 0), (1, 1, 2, 0)],
        [(0, 17, 3, 3)],
    ):
        driver.step(*rows)
        assert not replay.count, rows
    driver.step((0, 18, 1, 1), (2, 0, 15, 1))
    assert replay.count == 1
    driver.free(3)
    driver.open(3, prompt(9), replace(GREEDY, prompt_logprobs=1))
    driver.step((3, 0, 5, 0))
    assert replay.count == 1
    driver.plan.num_steps = 2
    driver.step((0, 19, 1, 1))
    assert replay.count == 3, "one after the other, as a graph that moves on is a decode graph"
    monkeypatch.setattr("runtime.worker.gpu.graph_runner.MAX_PIECES", 8)
    driver.step((3, 5, 4, 0), (2, 15, 5, 1), (1, 2, 18, 1))
    assert replay.count == 3, "a prompt that is scored is in no piece, either"


def test_a_prompt_longer_than_graph_inputs_is_sent_before(runner, monkeypatch):
    """Only its first tokens are computed by the step."""
    monkeypatch.setattr("runtime.worker.gpu.graph_runner.MAX_PIECES", 1)
    results = []
    for graphs in (False, True):
        driver = without_graphs(runner)
        if graphs:
            (replay,) = replayed_graphs(runner.steps, MixedShape(16, 0, 2, 1, 16, 160))
            monkeypatch.setattr(runner.steps.graph_runner.graph_io, "has_room", lambda *args: False)
        driver.open(1, prompt(100))
        driver.step((1, 0, 12, 0))
        results.append(driver.prefill(1, prompt(100), (28,), start=12))
    assert replay.count == 2
    torch.testing.assert_close(*results, rtol=0, atol=1e-4)


POOLED = SamplingParams(max_tokens=1, temperature=0.0, pooled=True)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_vectors_of_prompts(runner, monkeypatch, kind):
    """Beside decode rows, in one step or in chunks (the last may have one token), and in one graph or in several. The
    vectors equal the torch kernels' vectors. Means are launched."""

    def steps(driver: Driver) -> list[np.ndarray]:
        driver.open(0, prompt(9), PENALISED, seed=1)
        driver.open(1, prompt(21), POOLED)
        driver.open(2, prompt(12, salt=1), POOLED)
        first = driver.step((0, 0, 9, 1), (2, 0, 12, 1), (1, 0, 20, 0))
        second = driver.step((1, 20, 1, 1), (0, 9, 1, 1))
        assert [[row for row, _ in r.reports] for r in (first, second)] == [[1], [0]]
        assert [len(r.logprob_rows) for r in (first, second)] == [1, 1]
        vectors = [np.frombuffer(vector.numbers, np.float32) for r in (first, second) for _, vector in r.reports]
        return [*vectors, np.delete(first.token_ids, 1), np.delete(second.token_ids, 0)]

    pooler = Pooler(runner.decoder, runner.steps.num_slots, Pooling(kind))
    monkeypatch.setattr(runner.steps, "extras", [pooler])
    monkeypatch.setattr("runtime.worker.gpu.graph_runner._LEAST_REST", 1)
    config = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4, "max_model_len": 160, "pooling": kind}
    with mock.patch.object(ModelRunner, "_warm_up"):
        want = steps(Driver(tiny_runner(SPEC, **config)))
    driver, counts = without_graphs(runner), [2, 1, 0]
    shapes = MixedShape(16, 2, 4, 6, 16, 160), MixedShape(32, 2, 4, 6, 32, 160)
    replays = replayed_graphs(runner.steps, *shapes, (1, 4))
    for a, b in zip(steps(driver), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
    assert [r.count for r in replays] == (counts if kind == "last" else [0, 0, 0])
