"""Answers in channels from a random model: a strict reader reads all of them, whatever happens to their requests."""

from dataclasses import replace

import pytest

from benchmarks.library.channel_model import Turn, harmony_tokenizer, read_turn, write_harmony_model
from benchmarks.serving.channel_answers import KINDS, check
from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import Grammar, Request, SamplingParams
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.llm import LLM
from runtime.output.chat_prompt import ChatPrompter
from runtime.output.fields import read_options
from runtime.output.options import ChatOptions
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Speculation
from runtime.speculation.ngram import Ngram
from runtime.structured.grammar import compiled
from runtime.text.vocabulary import Vocabulary
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from tests.support.engine.fake_runner import FixedShare, Recorded
from tests.support.models.runner_driver import TINY

TOKENIZER = harmony_tokenizer()
SIZE = 320
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_harmony_model(tmp_path_factory.mktemp("harmony"))
    return LLM(str(folder), device="cpu", kv_cache_memory=0.1, max_num_seqs=32, num_threads=1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_random_answers_parse_without_an_error(llm: LLM, kind: str):
    found = check(llm, KINDS[kind], 24, 1.5)
    assert found["faults"] == []
    assert found["ended"] + found["cut"] == 24
    assert found["ended"] > 3
    assert found["cut"] > 3
    assert bool(found["calls"]) == ("tools" in KINDS[kind] and KINDS[kind].get("tool_choice") != "none")


def test_answers_that_ignore_eos_parse_without_an_error(llm: LLM):
    params = SamplingParams(max_tokens=300, temperature=1.5, ignore_eos=True, seed=4)
    for answer in llm.chat([HI] * 4, params, progress=False):
        ends = [at for at, token in enumerate(answer.token_ids) if token in TOKENIZER.eos_token_ids]
        turn = read_turn(answer.token_ids[: ends[0] + 1] if ends else answer.token_ids, TOKENIZER)
        assert (answer.text, answer.reasoning) == (turn.texts("final"), turn.texts("analysis"))


@pytest.mark.parametrize("kind", ["free", "tools", "JSON"])
@pytest.mark.parametrize("budget", [0, 4])
def test_a_budget_ends_reasoning_in_channels(llm: LLM, kind: str, budget: int):
    likely = tuple((TOKENIZER.token_to_id(text), 6.0) for text in ("<|channel|>", "analysis"))
    params = [SamplingParams(max_tokens=150, temperature=1.5, seed=i, logit_bias=likely) for i in range(8)]
    longest = 0
    for answer in llm.chat([HI] * 8, params, progress=False, thinking_token_budget=budget, **KINDS[kind]):
        turn = read_turn(answer.token_ids, TOKENIZER)
        found = [len(tokens) for tokens in texts_of(answer.token_ids, turn, "analysis")]
        assert sum(found) <= (budget + 3 if budget else 0)  # the rest of a character comes before the mark
        assert found or budget or not any(message.channel == "analysis" for message in turn.messages)
        longest = max(longest, sum(found))
    assert longest >= budget


def texts_of(token_ids: list[int], turn: Turn, channel: str) -> list[list[int]]:
    """The tokens of each message of a channel."""
    begins = [at + 1 for at, token in enumerate(token_ids) if token == TOKENIZER.token_to_id("<|message|>")]
    texts = []
    for begin, message in zip(begins, turn.messages, strict=True):
        ends = [at for at, token in enumerate(token_ids) if at >= begin and token in TOKENIZER.special_ids]
        if message.channel == channel:
            texts.append(token_ids[begin : min(ends, default=len(token_ids))])
    return texts


# ---- the state of a grammar ------------------------------------------------------------------------------------------


def grammar_of(**options: object) -> Grammar:
    chats, asked = ChatPrompter(TOKENIZER), read_options(ChatOptions, options)
    grammar = chats.grammar(asked, chats.prompt(HI, asked).message_format)
    assert grammar is not None
    return compiled(grammar.spec)


def runner_of(**config: object) -> ModelRunner:
    eos = TOKENIZER.eos_token_ids
    info = ModelInfo("", SIZE, 256, eos, 2, 16, "float32", "cpu")
    sizes = {"num_kv_blocks": 400, "max_num_seqs": 32, "max_model_len": 256, "num_threads": 1, "deterministic": True}
    source = DummySource(replace(TINY, vocab_size=SIZE), eos_token_ids=eos, vocabulary=Vocabulary.of(TOKENIZER, info))
    return build_runner(EngineConfig(**{"device": "cpu"} | sizes | config), source)


def outputs(runner: ModelRunner, params: list[SamplingParams], drafter=None, between=lambda core, step: None):
    runner.reset()
    speculation = None if drafter is None else Speculation(drafter, 3, (), 0.0)
    core, found, step = build_engine(runner.config, runner.info, InProcess(runner), speculation), {}, 0
    for i, each in enumerate(params):
        core.add(Request(str(i), [1 + i, 2, 3], 3, each, seed=i))
    while core.has_work:
        if (output := core.step()) is not None:
            for state, token in zip(output.states, output.token_ids, strict=True):
                found.setdefault(state.request.request_id, []).append(token)
            step += 1
            between(core, step)
    return found


def test_speculation_preemption_and_lost_runners_change_no_token():
    marks = tuple((TOKENIZER.token_to_id(mark), 2.0) for mark in ("<|end|>", "<|return|>", "<|call|>", '"', "}"))
    grammars = [grammar_of(**KINDS[kind]) for kind in ("free", "tools", "JSON", "regex", "one call", "no reasoning")]
    params = [SamplingParams(max_tokens=120, temperature=1.5, logit_bias=marks, grammar=g) for g in grammars * 2]
    runner = runner_of()
    plain = outputs(runner, params)
    for tokens in plain.values():
        read_turn(tokens, TOKENIZER)
    assert outputs(runner, params, Recorded(plain, 0.7, SIZE)) == plain
    assert outputs(runner, params, Ngram()) == plain

    def lose_runners(core: EngineCore, step: int) -> None:
        if step % 9 == 0:
            runner.reset()
            core.recover(InProcess(runner))

    assert outputs(runner, params, between=lose_runners) == plain
    assert outputs(runner, params, Recorded(plain, 0.7, SIZE), between=lose_runners) == plain
    counts = [0]

    def optimist(core: EngineCore, step: int) -> None:
        core.extras[Admission].lengths = FixedShare(0.0)
        counts.append(core.scheduler.stats.preemptions)

    tight = runner_of(num_kv_blocks=20, prefix_cache=False, max_num_seqs=6)
    assert outputs(tight, params, between=optimist) == plain
    assert counts[-1] > 0
