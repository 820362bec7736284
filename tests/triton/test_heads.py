"""Draft heads on the Triton path draft, sample and cache what the torch path does."""

from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.library.models import eagle3_head
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError, SamplingParams
from runtime.core.plan import DEVICE_DRAFT
from runtime.kernels.quantized.weight_conversions import dequantize_triton
from runtime.kernels.sampling.pinned import pin_samples, pin_samples_torch
from runtime.kernels.step import draft_rows
from runtime.models.heads.mtp import mtp_spec
from runtime.worker.gpu.graph_runner import DecodeShape
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from runtime.worker.warmup import WarmUp
from tests.support.kernels.triton_engine import SHALLOW, replayed_graphs
from tests.support.models.headed_runner import assistant_of
from tests.support.models.runner_driver import GREEDY, Driver
from tests.support.models.specs import changed

SPEC = changed(SHALLOW, hidden_size=64, num_heads=2, ffn_size=64)
HOT = SamplingParams(max_tokens=60, temperature=1.0, top_k=20)
PENALISED = SamplingParams(max_tokens=60, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5)
MAX_LEN = 96


SLIDING = changed(SPEC, num_layers=2, vocab_size=132, window=(20, 0), v_norm=True)  # which assistants read
HEADS = {  # each with its target
    "mtp": (SPEC, mtp_spec(SPEC)),
    "eagle3": (SPEC, replace(eagle3_head(SPEC, 60), taps=(0, 1, 1))),
    "assistant": (SLIDING, assistant_of(SLIDING)),
    "centroids": (SLIDING, assistant_of(SLIDING, centroids=12, best=3)),
}


def headed_runner(backend: str, head: str = "mtp", **config) -> ModelRunner:
    own = {"device": "cpu", "num_kv_blocks": 40, "max_num_seqs": 4, "max_model_len": MAX_LEN, "num_threads": 1}
    own |= {"dtype": "float32", "draft": "mtp", "max_num_batched_tokens": 96, "kernel_backend": backend}
    own |= {"draft_quantization": "none"}  # the torch path lacks quantized weights
    spec, draft_head = HEADS[head]
    with mock.patch.object(WarmUp, "build_kernels"), mock.patch.object(ModelRunner, "_time_steps"):
        return build_runner(EngineConfig(**own | config), DummySource(spec, draft_head=draft_head))


@pytest.fixture(scope="module", params=["mtp"])
def runners(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.kernels.linear.fused_linear.MAX_ROWS", 0)  # few rows have tests of their own
        yield headed_runner("torch", request.param), headed_runner("triton", request.param)


def prompt(length: int, salt: int = 0) -> list[int]:
    return np.random.default_rng([length, salt]).integers(0, SPEC.vocab_size, length).tolist()


class Rounds:
    """Runs rounds of requests in their slots, and keeps what each step returns."""

    def __init__(self, runner: ModelRunner, graphs: tuple[tuple[int, int], ...] = ()) -> None:
        if runner.asynchronous:
            runner.steps.graph_runner.graphs.clear()
            runner.steps.graph_runner.prefill_graphs.clear()
            if graphs:
                replayed_graphs(runner.steps, *graphs)
                most = max(DecodeShape(*shape).num_tokens for shape in graphs)
                width = runner.steps.head.head.spec.feature_width
                runner.steps.kernels.graph_features = torch.full((most, width), torch.nan)
        self.driver, self.kept, self.known = Driver(runner), [], {}

    def prefill(self, slot: int, tokens: list[int], drafts: int = 0, start: int = 0, others=(), **options) -> None:
        self.known[slot] = list(tokens)
        self.driver.open(slot, tokens, **options)
        self.step((slot, start, len(tokens) - start, 1, 0), *others, drafts=drafts)

    def step(self, *rows: tuple[int, int, int, int, int], drafts: int = 0) -> None:
        """Rows (slot, start, count, samples, draft tokens among `count`); their results are committed."""
        plan = self.driver.plan
        plan.next_drafts = drafts
        plan.draft_lens = np.array([row[4] for row in rows], np.int32)
        plan.draft_token_ids = np.full(plan.draft_lens.sum(), DEVICE_DRAFT, np.int32)
        result = self.driver.step(*[row[:4] for row in rows])
        ids, given = result.token_ids.tolist(), result.draft_token_ids.tolist()
        self.kept += [ids, given]
        for slot, _, _, samples, own in rows:
            sampled, ids = ids[:samples], ids[samples:]
            guesses, given = given[:own], given[own:]
            accepted = next((i for i, guess in enumerate(guesses) if guess != sampled[i]), len(guesses))
            self.known[slot] += sampled[: accepted + 1] if samples else []
            self.kept.append((slot, accepted))

    def verify(self, *slots: int, given: int, drafts: int) -> None:
        """A step with one row a slot: its last token and `given` draft tokens."""
        self.step(*((s, len(self.known[s]) - 1, given + 1, given + 1, given) for s in slots), drafts=drafts)

    def entries(self, slot: int) -> torch.Tensor:
        """The head's keys and values of the slot's tokens, from position 1 on."""
        blocks = torch.tensor(self.driver.tables[slot])
        values = self.driver.runner.steps.cache.layers[-1].values[:, :, blocks].flatten(2, 3)
        return values[:, :, 1 : len(self.known[slot])].clone()


def check(runners, script, graphs: tuple[tuple[int, int], ...] = ()) -> list:
    """Run a script on both backends; returns what the torch path's steps have returned."""
    want, got = Rounds(runners[0]), Rounds(runners[1], graphs)
    for rounds in (want, got):
        script(rounds)
    assert got.kept == want.kept
    for slot in want.known:
        torch.testing.assert_close(got.entries(slot), want.entries(slot), rtol=0, atol=1e-4)
    return want.kept


def several_rounds(rounds: Rounds, params=(GREEDY, HOT)) -> None:
    rounds.prefill(0, prompt(9), drafts=3, params=params[0], seed=1)
    rounds.verify(0, given=3, drafts=3)
    rounds.prefill(1, prompt(21), params=params[1], seed=2, drafts=2, others=[(0, len(rounds.known[0]) - 1, 4, 4, 3)])
    for given in (2, 3, 1):
        rounds.verify(0, 1, given=given if given < 3 else 2, drafts=3)
    rounds.verify(0, 1, given=3, drafts=0)
    rounds.verify(1, 0, given=0, drafts=3)
    rounds.verify(0, 1, given=3, drafts=1)


@pytest.mark.parametrize("graphs", [(), ((1, 1), (1, 4), (2, 2), (4, 1), (4, 3))])
def test_rounds_equal_those_of_torch(runners, graphs):
    kept = check(runners, several_rounds, graphs)
    assert any(any(x >= 0 for x in entry) for entry in kept if isinstance(entry, list))


@pytest.mark.parametrize("runners", ["eagle3"], indirect=True)
def test_rounds_of_a_head_with_taps_and_ids_of_its_own(runners):
    check(runners, several_rounds, ((1, 1), (4, 1), (4, 3)))


@pytest.mark.rotated
@pytest.mark.parametrize("runners", ["assistant", "centroids"], indirect=True)
@pytest.mark.parametrize("graphs", [(), ((1, 1), (1, 4), (2, 2), (4, 1), (4, 3))])
def test_rounds_of_assistants(runners, graphs):
    kept = check(runners, several_rounds, graphs)
    assert sum(min(entry) >= 0 for entry in kept if isinstance(entry, list) and len(entry) > 4) > 4
    check(runners, to_the_context, graphs)
    assert not runners[1].steps.head.features.values.numel()


def test_penalties_count_draft_tokens(runners):
    check(runners, partial(several_rounds, params=(PENALISED, PENALISED)), ((4, 1), (4, 3)))


def test_penalties_of_a_second_pass_count_draft_tokens(runners):
    """A GPU drafts these rows without penalties, so that only the accepted tokens are equal."""
    params, known = replace(PENALISED, logprobs=2), []
    for runner, graphs in zip(runners, ((), ((4, 1), (4, 3))), strict=True):
        rounds = Rounds(runner, graphs)
        several_rounds(rounds, (params, params))
        known.append(rounds.known)
    for want, got in zip(*(known[i].values() for i in (0, 1)), strict=True):
        shortest = min(len(want), len(got))
        assert want[:shortest] == got[:shortest]


def test_pinned_drafts_are_accepted(runners, monkeypatch):
    for runner in runners:
        monkeypatch.setattr(runner.steps.sampler, "pinned_acceptance", 2.4)
    kept = check(runners, several_rounds, ((1, 1), (4, 1), (4, 3)))
    accepted = [entry[1] for entry in kept if isinstance(entry, tuple)]
    assert max(accepted) == 2
    kept = check(runners, several_rounds)
    assert max(entry[1] for entry in kept if isinstance(entry, tuple)) == 2


def test_pinned_acceptance_is_refused_with_deterministic():
    with pytest.raises(CallboardError, match="pinned_acceptance changes tokens"):
        headed_runner("torch", deterministic=True, pinned_acceptance=2.0)


def test_pinned_acceptance_needs_a_head_and_is_reported(caplog):
    with pytest.raises(CallboardError, match="pinned_acceptance needs a draft head"):
        headed_runner("torch", draft=None, pinned_acceptance=2.0)
    headed_runner("torch", pinned_acceptance=2.0)
    assert "tokens are not the model's" in caplog.text


def test_a_prefix_hit_continues_with_its_feature(runners):
    def script(rounds: Rounds) -> None:
        first = prompt(40)
        rounds.prefill(0, first)
        shared = rounds.driver.tables[0][:2]
        rounds.prefill(1, [*first[:32], *prompt(5, 1)], drafts=3, start=32, shared=shared)
        rounds.verify(1, given=3, drafts=3)
        rounds.prefill(2, [*first[:32], 7], drafts=3, start=32, shared=shared)
        rounds.verify(1, 2, given=3, drafts=3)

    check(runners, script, ((1, 1), (4, 2)))


def to_the_context(rounds: Rounds) -> None:
    rounds.prefill(0, prompt(MAX_LEN - 8), drafts=3, params=HOT)
    while (room := MAX_LEN - 1 - len(rounds.known[0])) >= 0:
        rounds.verify(0, given=min(3, room), drafts=3)


def test_rounds_end_at_the_context(runners):
    check(runners, to_the_context)
    check(runners, to_the_context, ((4, 1),))


def test_chunks_of_a_prompt_extend_the_head(runners):
    def script(rounds: Rounds) -> None:
        tokens = prompt(30)
        rounds.known[0] = list(tokens)
        rounds.driver.open(0, tokens)
        for start, end in ((0, 11), (11, 16), (16, 17), (17, 29)):
            rounds.step((0, start, end - start, 0, 0))
        rounds.step((0, 29, 1, 1, 0), drafts=2)
        rounds.verify(0, given=2, drafts=2)

    check(runners, script, ((1, 1), (3, 1)))


def test_a_head_that_is_not_finite_drafts_nothing(runners):
    runner = runners[1]
    with mock.patch.object(runner.steps.head.head, "logits", lambda x, out=None: torch.full((len(x), 131), torch.nan)):
        rounds = Rounds(runner)
        rounds.prefill(0, prompt(9), drafts=2)
        rounds.verify(0, given=2, drafts=2)
    assert rounds.kept[4:6] == [[-1, -1], (0, 0)]


@pytest.mark.parametrize("form", ["auto", "fp8"])
def test_drafts_read_the_output_head_in_8_bits(runners, form):
    """Rounded rows make the draft logits, and the target's own head makes the samples."""
    runner, tolerance = headed_runner("triton", draft_quantization=form), 0.01 if form == "auto" else 0.1
    own, plain, generator = runner.head.head, runners[1].head.head, torch.Generator().manual_seed(0)
    copied, weight = own.output_copy, own.target.head.weight
    rows = dequantize_triton(copied.quantized, torch.float32)
    assert (rows - weight).norm() < tolerance * weight.norm()
    for num_rows in (1, 8, 20):
        x = torch.randn((num_rows, SPEC.hidden_size), generator=generator)
        torch.testing.assert_close(copied.in_float32(x), x @ rows.T, rtol=0, atol=0.02)
        error = (own.logits(x) - plain.logits(x)).norm() / plain.logits(x).norm()
        assert 0 < error < tolerance
    known = []
    for each in (runner, runners[1]):
        several_rounds(rounds := Rounds(each, ((4, 1), (4, 3))))
        known.append(rounds.known)
    for got, want in zip(*(known[i].values() for i in (0, 1)), strict=True):
        shortest = min(len(want), len(got))
        assert want[:shortest] == got[:shortest]


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_len", [1, 3, 9])
def test_kernels_equal_their_twins(row_len):
    """Rows accept some draft tokens. One does not sample, one ends at the context, one is padding."""
    rng, n, slots, max_len = np.random.default_rng(row_len), 7, 6, 40
    rows = torch.tensor([3, 0, 5, 1, 2, 4, slots], dtype=torch.int32)
    starts = torch.tensor([4, 16, max_len - row_len, 8, 1, 30, 1], dtype=torch.int32)
    counts = torch.tensor([row_len, max(1, row_len - 1), row_len, row_len, 1, row_len, 1], dtype=torch.int32)
    wanted = rows.repeat_interleave(row_len).view(n, row_len)
    wanted[3] = slots
    wanted[5, : row_len // 2] = slots
    tokens = torch.from_numpy(rng.integers(0, 2, (slots + 1, max_len), dtype=np.int32))
    drafts = torch.from_numpy(rng.integers(-1, 2, (slots + 1, draft_rows.DRAFT_WIDTH), dtype=np.int32))
    found = []
    for accept, keep in (
        (draft_rows.accept_drafts_torch, draft_rows.keep_drafts_torch),
        (draft_rows.accept_drafts, draft_rows.keep_drafts),
    ):
        places, index = torch.zeros((4, n), dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
        firsts, own = torch.arange(n, dtype=torch.int32) * row_len, drafts.clone()
        accept(rows, starts, counts, wanted.reshape(-1), firsts, tokens, own, places, index)
        own[slots] = 0
        for _ in range(2):
            keep(torch.arange(n, dtype=torch.int32), places, own, max_len)
        found.append((places, index, own[:slots]))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    hidden = torch.randn(n * row_len, 24)
    tables = torch.from_numpy(rng.permutation(70).astype(np.int32)[: (slots + 1) * 10].reshape(slots + 1, 10)) * 2
    kept = []
    for keep in (draft_rows.keep_block_ends_torch, draft_rows.keep_block_ends):
        features = torch.zeros(70, 24)
        keep(hidden, rows, starts, counts, tables, 2, 4, features)
        kept.append(features)
    assert torch.equal(*kept)


@pytest.mark.parametrize("mean", [1.0, 2.4, 3.0])
def test_pinned_samples_equal_their_twin(mean):
    slots = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 3, 3], dtype=torch.int32)
    positions = torch.tensor([7, 8, 9, 10, 5, 14, 15, 16, 0, 0], dtype=torch.int32)
    drafts = torch.arange(4 * draft_rows.DRAFT_WIDTH, dtype=torch.int32).view(4, -1) + 100
    drafts[2, 15] = -1
    found = []
    for pin in (pin_samples_torch, pin_samples):
        ids, tokens = torch.arange(10, dtype=torch.int32), torch.zeros((4, 20), dtype=torch.int32)
        pin(ids, slots, positions, tokens, drafts, mean)
        found.append((ids, tokens))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    always = int(mean - 1)
    assert (found[0][0][:always] == drafts[0, 7 : 7 + always]).all()
    assert found[0][0][4] == 4
