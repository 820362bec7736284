"""A head with random weights on a CPU: it changes no token, and its entries depend on the tokens before them alone."""

from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch

from runtime.assembly.engine import build_engine
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.core.plan import DEVICE_DRAFT, StepPlan, Transfers
from runtime.models.mixers.attention import AttentionMixer
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Speculation
from runtime.speculation.head_drafter import HeadDrafter
from runtime.worker.heads.head_rows import accepted_samples, extend_rows
from runtime.worker.warmup import WarmUp
from tests.support.engine.fake_runner import FixedShare
from tests.support.models.headed_runner import Rounds, assistant_of, headed_runner
from tests.support.models.runner_driver import GREEDY
from tests.support.models.specs import TINY, changed

HOT = SamplingParams(max_tokens=40, temperature=1.0, top_k=20)
ALL = SamplingParams(
    max_tokens=40, temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3,
    logit_bias=((3, 2.0), (9, -5.0)), min_tokens=10, stop_token_ids=(5, 6, 7, 8), logprobs=3,
)  # fmt: skip
PARAMS = [GREEDY, HOT, ALL]
TIGHT = {"num_kv_blocks": 34, "max_model_len": 106, "max_num_batched_tokens": 11, "max_num_seqs": 6, "block_size": 8}
MAX_LEN = 96
SLIDING = changed(TINY, num_layers=4, vocab_size=132, window=(24, 0), qk_norm="head", v_norm=True)
ASSISTED = {"spec": SLIDING, "head_of": assistant_of}
WINDOWS = changed(TINY, num_layers=4, window=(24, 0, 0, 0))  # the head's layer is in one group of several


@cache
def runner(**config):
    own = {"block_size": 16, "max_model_len": MAX_LEN, "deterministic": True, "kernel_backend": "torch"}
    return headed_runner(**own | config)


def prompt(length: int, salt: int = 0) -> list[int]:
    return np.random.default_rng([length, salt]).integers(0, TINY.vocab_size, length).tolist()


def answers(model, count, most=None):
    """Tokens and log-probabilities of `count` requests; `most` draft tokens a round, or None for none."""
    model.reset()
    speculation = None
    if most is not None:
        speculation = Speculation(HeadDrafter(model.info.head), most, ((1, 1.0), (64, 2.0)), 0.0)
    core, found = build_engine(model.config, model.info, InProcess(model), speculation), {}
    core.extras[Admission].lengths = FixedShare(0.1)
    for i in range(count):
        tokens = (prompt(1 + i % 9, i) * 9)[: 1 + 5 * i % 43]
        core.add(Request(str(i), tokens, len(tokens), PARAMS[i % 3], seed=i))
    while core.has_work:
        if (output := core.step()) is None:
            continue
        for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
            logprobs = output.logprobs[i].top if i in output.logprobs else ()
            found.setdefault(state.request.request_id, []).append((token, logprobs))
    return found, core.scheduler.stats.preemptions


@pytest.mark.rotated
@pytest.mark.one_in(2)
@pytest.mark.long
@pytest.mark.parametrize("head", [{}, ASSISTED], ids=["mtp", "assistant"])
@pytest.mark.parametrize("config", [{"max_num_seqs": 1}, {}, TIGHT], ids=["alone", "burst", "tight"])
def test_a_random_head_changes_no_token(config, head):
    more = {"num_kv_blocks": 70} if config is TIGHT and head else {}
    model, count = runner(**config | head | more), 3 if config == {"max_num_seqs": 1} else 24
    want, preemptions = answers(model, count)
    assert preemptions > 0 or config is not TIGHT
    for most in (2, 7):
        assert answers(model, count, most)[0] == want, most


@pytest.mark.parametrize("head", [{}, ASSISTED], ids=["mtp", "assistant"])
def test_a_model_without_the_head_makes_the_same_tokens(head):
    plain, headed = runner(draft=None, **head), runner(**head)
    assert plain.info.head is None
    has_same_blocks = plain.info.fingerprint == headed.info.fingerprint
    assert has_same_blocks == bool(head), "cached blocks lack the entries of a head that has some"
    assert (plain.memory.kv_cache.bytes_per_token == headed.memory.kv_cache.bytes_per_token) == bool(head)
    assert answers(plain, 9)[0] == answers(headed, 9, 3)[0]


@pytest.mark.parametrize("spec", [TINY, WINDOWS], ids=["one group", "windows"])
def test_drafts_after_a_hit_equal_those_computed_whole(spec):
    """To the bit, whatever the chunks; also if the hit's blocks are computed in the same step."""
    assert len(runner(spec=spec).memory.kv_cache.groups) == (1 if spec is TINY else 5)
    rounds, tokens, found = Rounds(runner(spec=spec)), prompt(60), {}
    options = {"params": HOT, "seed": 5, "drafts": 5}
    rounds.prefill(0, tokens, **options)
    found["whole"] = rounds.drafts(0, 5), rounds.entries(0)
    rounds.prefill(1, tokens, cuts=(3, 16, 17, 31, 48), **options)
    found["chunks"] = rounds.drafts(1, 5), rounds.entries(1)
    shared = rounds.driver.tables[0][:3]
    for slot, size in ((2, 16), (3, 32), (4, 48)):
        if spec is WINDOWS and size < 32:
            continue
        rounds.prefill(slot, tokens, start=size, shared=shared[: size // 16], **options)
        found[f"hit of {size}"] = rounds.drafts(slot, 5), rounds.entries(slot)
    want, entries = found["whole"]
    assert min(want) >= 0
    for name, (drafts, own) in found.items():
        assert drafts == want, name
        assert torch.equal(own, entries), name


def test_a_hit_may_read_blocks_of_the_same_step():
    rounds, tokens = Rounds(runner()), prompt(40)
    rounds.prefill(0, tokens, params=HOT, seed=5, drafts=5)
    want = rounds.drafts(0, 5)
    rounds = Rounds(runner())
    rounds.open(1, prompt(33, 1)[:1] + tokens[1:], params=HOT, seed=1)
    rounds.open(0, tokens, params=HOT, seed=5)
    rounds.open(2, tokens, params=HOT, seed=5, shared=rounds.driver.tables[0][:2])
    rounds.step((2, 32, 8, 1, 0), (0, 0, 40, 1, 0), (1, 0, 40, 1, 0), drafts=5)
    assert rounds.drafts(0, 5) == rounds.drafts(2, 5) == want


def test_entries_do_not_depend_on_rounds():
    """Accepted, rejected and unused draft tokens leave the entries that a prompt with the same tokens has."""
    rounds = Rounds(runner())
    rounds.prefill(0, prompt(9), params=HOT, seed=1, drafts=3)
    for given, drafts in ((3, 2), (2, 0), (0, 0), (0, 5), (5, 3), (1, 1), (0, 7), (7, 3)):
        rounds.verify(0, given=given, drafts=drafts)
    assert not all(map(all, rounds.accepted)), "some are rejected"
    tokens, drafts, entries = rounds.known[0], rounds.drafts(0, 3), rounds.entries(0)
    rounds.prefill(1, tokens[:-1], params=HOT, seed=1, prompt_len=9, drafts=3)
    assert rounds.known[1] == tokens
    assert rounds.drafts(1, 3) == drafts
    assert torch.equal(rounds.entries(1), entries)


def test_drafts_come_back_after_many_steps_without():
    rounds = Rounds(runner())
    rounds.prefill(0, prompt(5), params=HOT, seed=1)
    for _ in range(40):
        rounds.verify(0, given=0, drafts=0)
        assert rounds.drafts(0, 1) == [-1]
    rounds.verify(0, given=0, drafts=3)
    tokens, drafts = rounds.known[0], rounds.drafts(0, 3)
    again = Rounds(runner())
    again.prefill(0, tokens[:-1], params=HOT, seed=1, prompt_len=5, drafts=3)
    assert again.drafts(0, 3) == drafts


def test_steps_without_drafts_only_store():
    """Without attention and feed-forward layers, they leave the same entries to the bit."""
    rounds = [Rounds(runner()), Rounds(headed_runner(block_size=16, deterministic=True, kernel_backend="torch"))]
    for drafts, each in zip((0, 3), rounds, strict=True):
        compute, seen = AttentionMixer.mix, []
        layers = each.runner.steps.cache.layers

        def mix(mixer, h, norm, step, cache, seen=seen, own=layers[-1], compute=compute):
            seen.append(cache is own)
            return compute(mixer, h, norm, step, cache)

        with mock.patch.object(AttentionMixer, "mix", mix):
            each.prefill(0, prompt(21), cuts=(9,), params=HOT, seed=1, drafts=drafts)
            for _ in range(4):
                each.verify(0, given=0, drafts=drafts)
        assert any(seen) == (drafts > 0)
    assert rounds[0].known == rounds[1].known
    assert torch.equal(rounds[0].entries(0), rounds[1].entries(0))


def test_rounds_end_at_the_context():
    """No token lies behind `max_model_len`, and the tokens are those without drafts."""
    known = []
    for most in (0, 3):
        rounds = Rounds(runner())
        rounds.prefill(0, prompt(MAX_LEN - 11), drafts=most, params=HOT, seed=3)
        while (room := MAX_LEN - 1 - len(rounds.known[0])) >= 0:
            rounds.verify(0, given=min(most, room), drafts=most)
        known.append(rounds.known[0])
        assert rounds.drafts(0, 1) == [-1]
    assert known[0] == known[1]


def test_entries_behind_the_blocks_reach_no_other_request():
    """A row's table ends with the null block, and the head writes there."""
    rounds = Rounds(runner())
    rounds.prefill(1, prompt(20, 1), params=HOT, seed=2, drafts=3)
    before = rounds.runner.steps.cache.layers[-1].values[:, :, 1:].clone()
    rounds.prefill(0, prompt(16), drafts=7, room=0)
    (own,) = rounds.driver.tables[0]
    after = rounds.runner.steps.cache.layers[-1].values[:, :, 1:].clone()
    after[:, :, own - 1] = before[:, :, own - 1]
    assert torch.equal(after, before)


@pytest.mark.parametrize("name", ["forward", "logits"])
def test_a_head_that_is_not_finite_drafts_nothing(name):
    model = runner(max_num_seqs=4)
    want, _ = answers(model, 4)
    head = model.steps.head.head
    compute = getattr(head, name)

    def spoilt(*args: object) -> torch.Tensor:
        return compute(*args).fill_(torch.nan)

    with mock.patch.object(head, name, spoilt):
        assert answers(model, 4, 3)[0] == want
        rounds = Rounds(model)
        rounds.prefill(0, prompt(9), drafts=3)
        assert rounds.drafts(0, 3) == [-1, -1, -1]
        assert rounds.verify(0, given=3, drafts=3).draft_token_ids.tolist() == [-1, -1, -1]
    assert model.steps.cache.layers[-1].values[:, :, 0].isfinite().all(), "the null block is for all"
    answers(model, 3, 3)
    assert (model.steps.head.drafts >= 0).any(), "drafts come back"


def test_a_head_that_spoils_its_entries_spoils_no_target():
    """Its keys are in blocks that other layers use later."""
    model = runner(spec=WINDOWS, max_num_seqs=4, num_kv_blocks=60)
    want, _ = answers(model, 6)
    head = model.steps.head.head
    with mock.patch.object(head, "combined", lambda features: torch.full_like(features, torch.nan)):
        assert answers(model, 6, 3)[0] == want


def test_loaded_blocks_have_no_feature():
    rounds = Rounds(runner())
    rounds.prefill(0, prompt(33), drafts=1)
    head, blocks = runner().steps.head, rounds.driver.tables[0]
    assert head.features.values[blocks[:2]].any(1).all()
    loaded = np.array(blocks[:1], np.int32)
    zero = np.zeros(1, np.int32)
    head.features.forget_loaded(StepPlan(9, loads=Transfers(zero, zero, loaded, zero, bytes(16))), torch.from_numpy)
    assert head.features.values[blocks[:2]].any(1).tolist() == [False, True]
    runner().reset()
    assert not head.features.values.any()


def test_adapters_do_not_reach_the_head():
    model = runner(max_num_seqs=4)
    rounds = Rounds(model)
    rounds.prefill(0, prompt(9), drafts=3)
    seen = []
    forward = model.steps.head.head.forward

    def kept(batch, hidden, caches):
        seen.append(batch.adapters)
        return forward(batch, hidden, caches)

    with mock.patch.object(model.steps.head.head, "forward", kept):
        model.steps.slots.adapters[0] = 1
        model.steps.decoder.adapters = mock.Mock(adapted=lambda layers, rows: layers)
        rounds.verify(0, given=3, drafts=2)
        model.steps.decoder.adapters = None
    assert seen == [None, None]


def test_a_head_is_described_and_timed():
    model = headed_runner(block_size=8, kernel_backend="torch")
    assert (model.info.head.kind, model.info.head.most_drafts) == ("mtp", 7)
    times = WarmUp(model.steps, model.memory).time_drafts(7)
    assert [rows for rows, _ in times] == [1, 2, 4, 8]
    assert all(us >= 0 for _, us in times)


# ---- rows -----------------------------------------------------------------------------------------------------------


def rows_plan(*rows: tuple[int, int, int, int, int]) -> StepPlan:
    """Rows (slot, start, count, samples, draft tokens)."""
    columns = np.array(rows, np.int32).T.copy()
    drafts = np.full(columns[4].sum(), DEVICE_DRAFT, np.int32)
    return StepPlan(0, slots=columns[0], num_computed=columns[1], num_tokens=columns[2], num_samples=columns[3],
                    draft_lens=columns[4], draft_token_ids=drafts)  # fmt: skip


def test_accepted_samples_end_at_the_first_difference():
    plan = rows_plan(
        (3, 5, 4, 4, 3), (0, 7, 2, 0, 0), (1, 9, 3, 3, 2), (2, 0, 4, 1, 0), (4, 2, 2, 2, 1), (5, 1, 1, 1, 0)
    )
    drafts = np.array([7, 8, 9, -1, 6, 4], np.int32)
    samples = np.array([7, 8, 1, 2, 5, 6, 7, 3, 4, 4, -1], np.int32)
    found = accepted_samples(plan, drafts, samples)
    assert found.rows.tolist() == [0, 2, 3, 4], "a failed sample has no drafts after it"
    assert found.positions.tolist() == [8, 10, 4, 4]


def test_extend_rows_are_shifted_by_one():
    plan = rows_plan((0, 0, 5, 1, 0), (1, 16, 4, 1, 0), (2, 16, 1, 1, 0), (3, 60, 4, 1, 0), (4, 63, 1, 0, 0))
    is_new = np.array([True, True, False, False, False])
    rows = extend_rows(plan, is_new, 16, 64)
    assert rows.rows.tolist() == [0, 1, 2, 3]
    assert rows.plan.num_computed.tolist() == [1, 16, 17, 61]
    assert rows.plan.ends.tolist() == [6, 21, 18, 64]
    assert rows.continued.tolist() == [False, True, False, False]
