"""Deterministic mode: a miss, a hit on the device, a hit in the tier, and one after a new start give the same bits.

Each model stores its prefixes in a region. Another runner with another engine then finds them there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.library.make_adapter import modules_of, save_adapter
from runtime.assembly.engine import build_engine
from runtime.base.images import ImageSpan
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.llm import LLM
from runtime.speculation.choose_k import Speculation
from tests.models.test_determinism import SPECS as OTHER_SPECS
from tests.support.engine.fake_runner import Recorded
from tests.support.models.hybrid_engine import SPECS as HYBRID_SPECS
from tests.support.models.runner_driver import tiny_runner
from tests.support.models.specs import changed
from tests.support.models.tiny_images import TOKEN_ID, span_of, tiny_tower

DENSE = OTHER_SPECS["tiny"]
SPECS = {
    "dense": DENSE, "bfloat16": DENSE, "fp8": DENSE, "int8": DENSE, "images": DENSE,
    "latents": OTHER_SPECS["latents"], **{name: HYBRID_SPECS[name] for name in HYBRID_SPECS if name != "wide"},
}  # fmt: skip
SETTINGS = {"bfloat16": {"dtype": "bfloat16"}, "fp8": {"kv_cache_dtype": "fp8"}, "int8": {"kv_cache_dtype": "int8"}}
CASES = [(name, False) for name in SPECS] + [(name, True) for name in ("dense", "windows", "delta", "images")]
PROMPT, TURN, ANSWER, LONGEST = 320, 40, 12, 512  # tokens
TIER = {"kv_tier_name": "test", "kv_tier_memory": 0.02, "num_threads": 1, "deterministic": True}


@pytest.fixture(autouse=True)
def _tier_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLBOARD_TIER", str(tmp_path / "tier"))


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


class Talks:
    """An engine with a runner, and two conversations of two turns with it."""

    def __init__(self, name: str, known: list[Answer] | None, **config: Any) -> None:
        """With the `known` answers it verifies drafts. Some of them are right."""
        self.spec, self._is_seen = changed(SPECS[name], max_positions=LONGEST), name == "images"
        runner = tiny_runner(
            self.spec, tower=tiny_tower(self.spec.hidden_size) if self._is_seen else None, max_model_len=LONGEST,
            num_kv_blocks=400, max_num_seqs=4, **SETTINGS.get(name, {}), **TIER | config,
        )  # fmt: skip
        drafts = {str(number): answer.tokens for number, answer in enumerate(known or ())}
        speculation = Speculation(Recorded(drafts, 0.7, self.spec.vocab_size), 4, (), 0.0) if known else None
        self.core = build_engine(runner.config, runner.info, InProcess(runner), speculation)

    def answers(self) -> list[Answer]:
        """The answers of both conversations in each turn."""
        prompts, found = [self._prompt(seed) for seed in (1, 2)], list[Answer]()
        for turn in (0, 1):
            answers = self._ask(prompts, turn)
            prompts = [p + a.tokens + self._text(9, TURN) for p, a in zip(prompts, answers, strict=True)]
            found += answers
        return found

    def _prompt(self, seed: int) -> list[int]:
        """Random tokens, perhaps with images among them."""
        tokens = self._text(seed, PROMPT)
        for span in self._spans(seed):
            tokens[span.begin : span.end] = [TOKEN_ID] * (span.end - span.begin)
        return tokens

    def _spans(self, seed: int) -> tuple[ImageSpan, ...]:
        return (span_of(20, seed, 4, 6), span_of(250, seed + 10, 5, 5)) if self._is_seen else ()

    def _text(self, seed: int, length: int) -> list[int]:
        found: list[int] = np.random.default_rng(seed).integers(2, self.spec.vocab_size, length).tolist()
        return found

    def _ask(self, prompts: list[list[int]], turn: int) -> list[Answer]:
        params = SamplingParams(max_tokens=ANSWER, temperature=0.8 * turn, logprobs=1, ignore_eos=True)
        found = {str(2 * turn + number): Answer([], []) for number in range(len(prompts))}
        for (name, _), prompt in zip(found.items(), prompts, strict=True):
            images = self._spans(int(name) % 2 + 1)
            self.core.add(Request(name, prompt, len(prompt), params, seed=int(name), images=images))
        while self.core.has_work:
            if (output := self.core.step()) is None:
                continue
            for at, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
                answer = found[state.request.request_id]
                answer.tokens.append(token)
                answer.logprobs.append(output.logprobs[at].logprob)
            assert self.core.scheduler.find_faults() == []
        return list(found.values())

    def figure(self, name: str) -> float:
        return float(self.core.stats()[name])


@pytest.mark.parametrize(
    ("name", "drafts"),
    [(name, False) for name in SPECS] + [(name, True) for name in ("dense", "windows", "delta", "images")],
)
def test_hits_of_every_kind_equal_a_miss(name: str, drafts: bool):
    expected = Talks(name, None, kv_tier_name=None, prefix_cache=False).answers()
    first = Talks(name, known := expected if drafts else None)
    assert first.answers() == expected, "first a miss, then a hit on the device"
    assert first.answers() == expected, "hits on the device"
    assert first.figure("tier_hit_tokens") == 0
    first.core.scheduler.pool.evict_unheld()
    assert first.answers() == expected, "hits in the tier"
    assert first.figure("tier_hit_tokens") > PROMPT
    again = Talks(name, known)
    assert again.answers() == expected, "after a new start"
    assert again.figure("tier_hit_tokens") > PROMPT
    assert again.figure("tier_damaged") == first.figure("tier_damaged") == 0
    assert again.figure("images_encoded") == 0, "their embeddings are not needed"
    if drafts:
        assert sum(again.core.current_stats().accepted_by_position) > 0


@pytest.mark.parametrize("name", ["dense", "delta", "conv"])
def test_hits_differ_by_rounding_alone_in_default_mode(name: str):
    """float32: a wrong block or state would change log-probabilities by more than the order of sums does."""

    def first_logprobs(talks: Talks) -> list[float]:
        return [answer.logprobs[0] for answer in talks.answers()]

    settings = {"deterministic": False, "dtype": "float32"}
    computed = first_logprobs(Talks(name, None, kv_tier_name=None, prefix_cache=False, **settings))
    talks = Talks(name, None, **settings)
    first_logprobs(talks)
    on_device = first_logprobs(talks)
    talks.core.scheduler.pool.evict_unheld()
    in_tier = first_logprobs(talks)
    assert talks.figure("tier_hit_tokens") > PROMPT
    np.testing.assert_allclose(on_device, computed, rtol=1e-5)
    np.testing.assert_allclose(in_tier, computed, rtol=1e-5)


def test_grammars_and_adapters_find_their_own_prefixes(write_tiny_gguf: Callable[..., Path], tmp_path: Path):
    path = str(write_tiny_gguf(**{"llama.context_length": LONGEST}))
    prompt = (list(range(2, 60)) * 9)[:PROMPT]
    params = SamplingParams(max_tokens=ANSWER, temperature=0.7, seed=4, logprobs=1)

    def answers(**config: Any) -> tuple[list[Any], float]:
        llm, found = LLM(path, max_loras=2, draft="ngram", num_draft_tokens=3, **TIER | config), []
        for seed in (1, 2):
            if not (folder := tmp_path / str(seed)).exists():
                save_adapter(folder, modules_of(llm.runner.spec), seed)
        for name in ("", "1", "2"):
            adapter = name and llm.load_adapter(str(tmp_path / name))
            for options in ({}, {"structured_outputs": {"regex": "[ab]{3,9}c"}}):
                (answer,) = llm.generate(prompt, params, adapter=adapter, **options)
                found.append((answer.token_ids, [entry.logprob for entry in answer.logprobs]))
        return found, llm.engine.stats().get("tier_hit_tokens", 0.0)

    expected, _ = answers(kv_tier_name=None, prefix_cache=False)
    assert len({str(tokens) for tokens, _ in expected[::2]}) == 3
    assert answers() == (expected, 0.0)
    found, num_hit = answers()
    assert found == expected
    assert num_hit >= 3 * 256, "once with each adapter, and once without"
