"""Models with recurrent states or windows, in deterministic mode: the same bits for every history of a request."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.assembly.engine import build_engine
from runtime.core.executor import InProcess
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.kernels.llvm.support import obstacle
from runtime.policy.admission import Admission
from runtime.spec.decoder_spec import DecoderSpec
from runtime.spec.mixer_spec import DeltaRuleSpec, ShortConvSpec
from runtime.spec.types import CallboardError, Request, SamplingParams
from runtime.speculation.choose_k import Speculation
from tests.support.engine.fake_runner import FixedShare, Recorded
from tests.support.examples import examples
from tests.support.models.runner_driver import tiny_runner

DELTA = DecoderSpec(
    num_layers=3, hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=80, vocab_size=131,
    max_positions=512, norm_eps=1e-6, qk_norm=True, output_gate=True, tied_head=True,
    mixer=DeltaRuleSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=24, width=4), stateful=(True, True, False),
)  # fmt: skip
CONV = replace(
    DELTA, output_gate=False, mixer=ShortConvSpec(channels=48, width=3), stateful=(True, False, True)
)  # fmt: skip
WINDOWS = DecoderSpec(
    num_layers=4, hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=80, vocab_size=131,
    max_positions=512, norm_eps=1e-6, window=40, sliding=(True, True, False, True), tied_head=True,
)  # fmt: skip
SPECS = {"delta": DELTA, "conv": CONV, "windows": WINDOWS}
BACKENDS = ["torch", pytest.param("llvm", marks=pytest.mark.skipif(bool(obstacle()), reason=str(obstacle())))]
SEQS = 4
Answer = list[tuple[int, float]]  # tokens and their log-probabilities


def hybrid_runner(model: str, backend: str, **config):
    limits = {"max_num_seqs": SEQS, "max_model_len": 400, "num_threads": 1, "dtype": "float32"}
    return tiny_runner(SPECS[model], deterministic=True, kernel_backend=backend, **limits | config)


class Engine:
    """An engine core with a real runner. It keeps what each request has got."""

    def __init__(self, model: str, backend: str, drafter=None, **config) -> None:
        self.make = lambda: hybrid_runner(model, backend, **config)
        runner = self.make()
        speculation = None if drafter is None else Speculation(drafter, 5, (), 0.0)
        self.core = build_engine(runner.config, runner.info, InProcess(runner), speculation)
        self.answers: dict[str, Answer] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, logprobs=1)
        self.core.add(Request(name, prompt, len(prompt), params, seed=len(prompt)))
        self.answers[name] = []

    def step(self) -> None:
        if (output := self.core.step()) is not None:
            for at, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
                self.answers[state.request.request_id].append((token, output.logprobs[at].logprob))

    def finish(self) -> None:
        while self.core.has_work:
            self.step()
            assert self.core.scheduler.find_faults() == []

    def lose(self) -> None:
        self.core.lose()
        self.core.recover(InProcess(self.make()))

    @property
    def cached(self) -> int:
        return self.core.scheduler.stats.prompt_tokens_cached


def prompt_of(kind: int, length: int) -> list[int]:
    """Prompts of a kind are prefixes of one text."""
    return torch.randint(0, 131, (400,), generator=torch.Generator().manual_seed(kind)).tolist()[:length]


@cache
def alone(model: str, backend: str, prompt: tuple[int, ...], max_tokens: int) -> Answer:
    """The answer to a prompt without cache, mates, chunks and drafts."""
    engine = _plain(model, backend)
    name = f"r{len(engine.answers)}"
    engine.add(name, list(prompt), max_tokens)
    engine.finish()
    return engine.answers[name]


@cache
def _plain(model: str, backend: str) -> Engine:
    return Engine(model, backend, prefix_cache=False, max_num_batched_tokens=512)


MAX_TOKENS = 24
lengths = st.sampled_from([1, 2, 63, 64, 65, 66, 100, 128, 129, 130, 192, 200, 257])
adds = st.tuples(st.just("add"), st.integers(0, 1), lengths)
turns = st.tuples(st.just("turn"), st.integers(0, 3), st.integers(1, 70))
steps = st.tuples(st.just("step"), st.integers(1, 30), st.none())
losses = st.tuples(st.just("lose"), st.none(), st.none())
rounds = st.tuples(st.lists(st.one_of(adds, adds, turns), min_size=1, max_size=4), st.one_of(steps, steps, losses))
events = st.lists(rounds, min_size=2, max_size=4).map(lambda pairs: [e for some, last in pairs for e in [*some, last]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", SPECS)
def test_no_history_changes_a_bit(model, backend):
    """Hits, misses, chunks, mates, preemptions, lost runners, draft tokens and few snapshots."""
    seen = {"hits": 0, "preemptions": 0, "accepted": 0, "rejected": 0}

    @settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(events, st.sampled_from([64, 130, 400]), st.sampled_from([30, 400]), st.sampled_from([0, 0.0001, 0.01]),
           st.sampled_from([None, 0.3, 1.0]))  # fmt: skip
    def run(history, chunk, num_kv_blocks, snapshot_memory, share_right):
        most = SPECS[model].kv_cache("float32", longest=400).most_blocks(400, 16, chunk + SEQS)
        known: dict[str, list[int]] = {}
        drafter = None if share_right is None else Recorded(known, share_right, 131)
        engine = Engine(
            model, backend, drafter, max_num_batched_tokens=chunk + SEQS, snapshot_memory=snapshot_memory,
            num_kv_blocks=num_kv_blocks + most - (29 if model == "windows" else 25),
        )  # fmt: skip
        engine.core.extras[Admission].lengths = FixedShare(0.0)  # it admits too many
        prompts: dict[str, list[int]] = {}

        def add(prompt: list[int]) -> None:
            name = f"r{len(prompts)}"
            prompts[name] = prompt[: 400 - MAX_TOKENS - 1]
            known[name] = [token for token, _ in alone(model, backend, tuple(prompts[name]), MAX_TOKENS)]
            engine.add(name, prompts[name], MAX_TOKENS)

        for kind, value, more in history:
            if kind == "add":
                add(prompt_of(value, more))
            elif kind == "turn" and prompts:
                name = f"r{value % len(prompts)}"
                add([*prompts[name], *[t for t, _ in engine.answers[name]], *prompt_of(9, more)])
            elif kind == "step":
                for _ in range(value):
                    engine.step()
            elif kind == "lose":
                engine.lose()
        engine.finish()
        stats = engine.core.scheduler.stats
        for name, prompt in prompts.items():
            assert engine.answers[name] == alone(model, backend, tuple(prompt), MAX_TOKENS)
        seen["hits"] += engine.cached
        seen["preemptions"] += stats.preemptions
        seen["accepted"] += stats.accepted_draft_tokens
        seen["rejected"] += stats.draft_tokens - stats.accepted_draft_tokens

    run()
    assert min(seen.values()) > 0, seen


@pytest.mark.parametrize(("model", "num_cached"), [("delta", 128), ("conv", 128), ("windows", 144)])
def test_second_turn_is_a_hit(model, num_cached):
    engine = Engine(model, "torch")
    engine.add("first", prompt_of(0, 150), 8)
    engine.finish()
    engine.add("second", [*prompt_of(0, 150), *[t for t, _ in engine.answers["first"]], 5, 6], 8)
    engine.finish()
    assert engine.cached == num_cached


def test_windows_make_room():
    """Each sliding layer is a group. Beyond its window and a chunk it keeps nothing."""
    runner = hybrid_runner("windows", "torch", max_num_batched_tokens=64)
    assert [group.layers for group in runner.info.kv_cache.groups] == [(2,), (0,), (1,), (3,)]
    manager = KVCacheManager(runner.info, prefix_cache=True, max_chunk=64)
    assert manager.most_blocks_for(400) == 25 + 3 * 9
    assert runner.memory.kv_cache.most_tokens(52, 16, 64) == 400
    assert tiny_runner(WINDOWS, max_model_len=40).info.kv_cache is None


def test_small_budget_is_refused():
    with pytest.raises(CallboardError, match=r"max_num_batched_tokens is 64; .* at least 68"):
        hybrid_runner("delta", "torch", max_num_batched_tokens=64)


def test_draft_with_states_is_refused():
    with pytest.raises(CallboardError, match="has recurrent states, which cannot take back tokens"):
        tiny_runner(DELTA, is_draft=True)


def test_memory_plan_counts_states():
    runner = hybrid_runner("delta", "torch", snapshot_memory=0.01)
    memory, states = runner.memory, runner.memory.kv_cache.states
    assert memory.states == memory.num_states * states.bytes_per_state + (SEQS + 1) * states.bytes_per_slot
    assert runner.info.num_states == memory.num_states > SEQS + 1
    assert f"{memory.num_states - SEQS - 1} snapshots" in str(memory)
    assert runner.steps.cache.states.rows.numel() >= memory.num_states * states.bytes_per_state
