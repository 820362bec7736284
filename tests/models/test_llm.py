"""Offline Python on a tiny random model: no toggle changes a token of deterministic mode (C6); texts, stops, seeds."""

import itertools
import json
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest

from benchmarks.library.make_adapter import modules_of, save_adapter
from runtime.base.types import CallboardError, FinishReason, SamplingParams
from runtime.llm import LLM
from runtime.policy.admission import Admission
from runtime.structured.grammar import grammar_of
from tests.support.engine.fake_runner import FixedShare
from tests.support.models.tiny_gguf import TINY_TOKENS

BASE = {"deterministic": True, "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 4, "num_kv_blocks": 80}
SHARED = [5, 9, 33, 7, 8, 41, 3, 3, 9]
PROMPTS = [SHARED, [*SHARED, 17, 60], [8] * 21, [40, 3], [*SHARED, 17, 60, 2, 2, 8, 9], list(range(2, 40))]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=15, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.7, top_k=9, top_p=0.9, seed=2),
    SamplingParams(max_tokens=9, temperature=1.5, min_p=0.01, seed=3, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=14, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, seed=4),
    SamplingParams(max_tokens=11, logit_bias=((7, 3.0), (8, -90.0)), min_tokens=5, stop_token_ids=(7,), seed=5),
]


@pytest.fixture
def load(write_tiny_gguf):
    path = str(write_tiny_gguf())
    return lambda **kw: LLM(path, **(BASE | kw))


def tokens(llm):
    return [(c.token_ids, c.finish_reason, [p.token_id for p in c.logprobs]) for c in llm.generate(PROMPTS, PARAMS)]


def test_no_toggle_changes_a_token(load):
    expected = tokens(load(max_num_seqs=1))  # each request alone, in turn
    toggles = (
        {},
        {"pipeline_depth": 1},
        {"prefix_cache": False},
        {"batching": "static"},
        {"kv_layout": "contiguous", "num_kv_blocks": None},
        {"chunked_prefill": False, "max_model_len": 100, "max_num_batched_tokens": 100},
        {"max_num_batched_tokens": 3},
        {"policy": "sjf"},
        {"block_size": 16},
        {"num_kv_blocks": 26, "max_model_len": 60},
    )
    for toggle in toggles:
        llm = load(**toggle)
        assert tokens(llm) == expected, toggle
        assert tokens(llm) == expected, f"{toggle}, once more with a warm prefix cache"


def test_a_draft_model_changes_no_token(load, write_tiny_gguf):
    """One draft is the model itself, and one has other weights. Their context may be shorter than the model's."""
    expected = tokens(load())
    rng = np.random.default_rng(9)
    other = {"output_norm.weight": rng.normal(1, 0.5, 32).astype(np.float32)}
    drafts = {
        "same": write_tiny_gguf(name="same.gguf"),
        "other": write_tiny_gguf(tensors=other, name="other.gguf", llama__context_length=48),
    }
    for draft, count in (("same", 3), ("other", 5), ("same", None)):
        llm = load(draft=str(drafts[draft]), num_draft_tokens=count, draft_kv_cache_memory=0.01)
        assert tokens(llm) == expected
        if count:
            scheduler = llm.engine.scheduler
            assert scheduler.stats.draft_tokens > 0
            assert (scheduler.stats.accepted_draft_tokens == scheduler.stats.draft_tokens) == (draft == "same")


def test_only_adapters_change_tokens(load, write_tiny_gguf, tmp_path):
    """Neither a draft does, nor prefixes of requests with another adapter, or without one."""
    plain = load(max_loras=2, max_num_seqs=1, prefix_cache=False)
    for seed in (1, 2, 3):
        save_adapter(tmp_path / str(seed), modules_of(plain.runner.spec), seed)

    def answers(llm: LLM, adapter: str = "") -> list[list[int]]:
        return [c.token_ids for c in llm.generate(PROMPTS, PARAMS[0], adapter=adapter and llm.load_adapter(adapter))]

    folders = ["", *(str(tmp_path / str(seed)) for seed in (1, 2))]
    alone = [answers(plain, folder) for folder in folders]
    assert len({str(tokens) for tokens in alone}) == 3
    draft = str(write_tiny_gguf(name="draft.gguf"))
    for more in ({}, {"draft": draft, "draft_kv_cache_memory": 0.01}):
        llm = load(max_loras=2, **more)
        for _ in range(2):
            assert [answers(llm, folder) for folder in folders] == alone
        assert llm.generate(PROMPTS[0], PARAMS[0], adapter=llm.load_adapter(folders[1]))[0].num_cached == 8
    with pytest.raises(CallboardError, match="2 adapters loaded, as many as max_loras allows"):
        llm.load_adapter(str(tmp_path / "3"))
    llm.unload_adapter(llm.load_adapter(folders[1]))
    assert answers(llm, str(tmp_path / "3")) not in alone


def test_a_draft_with_another_vocabulary_is_refused(load, write_tiny_gguf):
    words, types = [*TINY_TOKENS, "other"], [3, 3, *[1] * (len(TINY_TOKENS) - 1)]
    draft = write_tiny_gguf(
        name="draft.gguf", tokenizer__ggml__tokens=words, tokenizer__ggml__token_type=types
    )  # refused before its weights are read
    with pytest.raises(CallboardError, match=r"vocabulary \(263 tokens\) than the model .* \(262 tokens\)"):
        load(draft=str(draft))


def test_a_preempted_request_gives_the_same_tokens(load):
    params = [SamplingParams(max_tokens=40, seed=i, logit_bias=((0, -100.0),)) for i in range(4)]
    alone = [c.token_ids for c in load().generate([SHARED] * 4, params)]
    tight = load(num_kv_blocks=26, max_model_len=60, prefix_cache=False)
    tight.engine.extras[Admission].lengths = FixedShare(0.0)
    assert [c.token_ids for c in tight.generate([SHARED] * 4, params)] == alone
    assert tight.engine.scheduler.stats.preemptions > 0


def test_stream_equals_generate_and_stop_strings_cut(load):
    llm = load()
    params = SamplingParams(max_tokens=40, seed=7, ignore_eos=True)
    whole = llm.generate("hell", params)[0]
    assert "".join(llm.stream("hell", params)) == whole.text
    assert whole.finish_reason is FinishReason.LENGTH
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = llm.generate("hell", SamplingParams(max_tokens=40, seed=7, ignore_eos=True, stop=(stop,)))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop) == (FinishReason.STOP, stop)
    assert not llm.engine.scheduler.requests
    last = whole.token_ids[20]
    ended = llm.generate("hell", SamplingParams(max_tokens=40, seed=7, ignore_eos=True, stop_token_ids=(last,)))[0]
    at = whole.token_ids.index(last)
    assert (ended.token_ids, ended.stop) == (whole.token_ids[: at + 1], last)
    assert ended.text == llm.tokenizer.decode(whole.token_ids[:at])


def test_closing_a_stream_ends_its_request(load):
    llm = load()
    stream = llm.stream("hell", SamplingParams(max_tokens=60, seed=7, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.has_work


def test_interrupted_step_leaves_the_llm_usable(load):
    """A half-read stream goes on, too: its request is computed again."""
    llm, params = load(), SamplingParams(max_tokens=30, seed=7, ignore_eos=True)
    (expected,) = llm.generate("hell", params)
    half_read = llm.stream("hell", params)
    text = next(half_read)
    execute, calls = llm.runner.steps._execute, itertools.count(1)

    def interrupted(plan):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return execute(plan)

    llm.runner.steps._execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate("wor", params)
    assert list(llm.engine.scheduler.requests) == ["2"]
    assert llm.generate("hell", params)[0].token_ids == expected.token_ids
    assert text + "".join(half_read) == expected.text
    assert not llm.engine.has_work


def test_interrupted_draft_step_leaves_the_llm_usable(load, write_tiny_gguf):
    llm = load(draft=str(write_tiny_gguf()), num_draft_tokens=3, draft_kv_cache_memory=0.01)
    params = SamplingParams(max_tokens=30, seed=7, ignore_eos=True)
    (expected,) = llm.generate("hell", params)
    steps = llm._draft.executor._runner.steps
    execute = steps._execute
    steps._execute = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("wor", params)
    steps._execute = execute
    before = llm.engine.stats()["accepted_draft_tokens"]
    assert llm.generate("hell", params)[0].token_ids == expected.token_ids
    assert llm.engine.stats()["accepted_draft_tokens"] > before


def test_streams_and_other_calls_may_alternate(load):
    llm, params = load(), SamplingParams(max_tokens=30, seed=7, ignore_eos=True)
    expected = [llm.generate(prompt, params)[0].text for prompt in ("hell", "wor")]
    streams = [llm.stream(prompt, params) for prompt in ("hell", "wor")]
    texts = [next(stream) for stream in streams]
    assert llm.generate("wor", params)[0].text == expected[1]
    llm.stream("hello", params).close()
    closed = llm.stream("hello", params)
    next(closed)
    closed.close()
    for i, stream in enumerate(streams):
        texts[i] += "".join(stream)
    assert texts == expected


def test_stream_collected_within_a_step_ends_after_it(load):
    """The garbage collector closes an abandoned stream wherever it runs."""
    llm, params = load(), SamplingParams(max_tokens=30, seed=7, ignore_eos=True)
    (expected,) = llm.generate("hell", params)
    abandoned = llm.stream("wor", params)
    next(abandoned)
    execute, calls = llm.runner.steps._execute, itertools.count(1)

    def collecting(plan):
        if next(calls) == 3:
            abandoned.close()
        return execute(plan)

    llm.runner.steps._execute = collecting
    assert llm.generate("hell", params)[0].token_ids == expected.token_ids
    assert not llm.engine.has_work


def test_stream_of_a_failed_request_raises(load):
    llm, params = load(num_kv_blocks=30), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompt = list(range(2, 20))
    llm.generate([prompt], params)
    cached = sorted(llm.engine.scheduler.kv_cache.cache._hash_of)
    for layer in llm.runner.steps.cache.layers:
        layer.values[:, :, cached[0], 1] = float("nan")
    with pytest.raises(CallboardError, match="not finite"):
        "".join(llm.stream(prompt, params))


def test_interrupted_adapter_load_gives_its_index_back(load, tmp_path):
    llm = load(max_loras=1)
    save_adapter(tmp_path / "a", modules_of(llm.runner.spec), 2)
    load_adapter = llm.runner.load_adapter
    llm.runner.load_adapter = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.load_adapter(str(tmp_path / "a"))
    llm.runner.load_adapter = load_adapter
    adapter = llm.load_adapter(str(tmp_path / "a"))
    assert len(llm.generate("hell", SamplingParams(max_tokens=2), adapter=adapter)[0].token_ids) == 2


def test_chat_takes_one_conversation_or_several(load):
    llm = load()
    hello = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=5, temperature=0)
    one = llm.chat(hello, params)
    two = llm.chat([hello, [{"role": "user", "content": "hell"}]], params)
    assert one[0].token_ids == two[0].token_ids
    assert one[0].prompt_token_ids == llm.tokenizer.encode("<|start|>hello<|end|>", add_special_tokens=False)


def test_a_value_that_is_not_finite_fails_one_request(load):
    """The value was left in a block of a cached prefix. The request that reads it fails, and the next one computes the
    prefix again."""
    llm, params = load(num_kv_blocks=30), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompt = list(range(2, 20))
    (expected,) = llm.generate([prompt], params)
    cached = sorted(llm.engine.scheduler.kv_cache.cache._hash_of)
    for layer in llm.runner.steps.cache.layers:
        layer.values[:, :, cached[0], 1] = float("nan")
    (failed,) = llm.generate([prompt], params)
    assert (failed.finish_reason, failed.token_ids) == (FinishReason.ERROR, [])
    for num_cached in (0, 16):
        (again,) = llm.generate([prompt], params)
        assert (again.token_ids, again.num_cached) == (expected.token_ids, num_cached)


def test_errors_of_bad_calls_name_the_change(load, tmp_path):
    llm = load()
    with pytest.raises(CallboardError, match="2 prompts and 1 SamplingParams"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(CallboardError, match="maximum context length"):
        llm.generate([[5] * 500])
    with pytest.raises(CallboardError, match="Token id 262 "):
        llm.generate([[5, 262]])
    assert not llm.engine.has_work
    with pytest.raises(CallboardError, match="tensor_parallel_size"):
        LLM("x", tensor_parallel_size=2)
    with pytest.raises(CallboardError, match="nothing"):
        LLM(str(tmp_path / "nothing.gguf"))


def test_an_answer_bound_to_a_schema(load):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["ok", "n"],
    }
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, grammar=grammar_of(schema))
    (answer,) = load().generate([SHARED], params)
    assert answer.finish_reason is FinishReason.STOP
    assert jsonschema.validators.validator_for(schema)(schema).is_valid(json.loads(answer.text))
