"""Options of LLM.generate and LLM.chat besides sampling, as HTTP: n, structured output, tools, reasoning, scores."""

import json
import re

import numpy as np
import pytest
import torch

from runtime.base.types import CallboardError, FinishReason, SamplingParams
from runtime.llm import LLM
from runtime.text.tool_calls import CallDelta
from tests.support.http.chats import ARGUMENTS, CALL, LLAMA, QWEN, THINKING, TIME_CALL, TOOLS

SMALL = {"deterministic": True, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 400}
HELLO = [{"role": "user", "content": "hello"}]
PARAMS = SamplingParams(max_tokens=60, seed=3)
PARAMS_LONG = SamplingParams(max_tokens=400, seed=1, ignore_eos=True)


@pytest.fixture
def load(write_tiny_gguf):
    def make(template: str | None = QWEN, **metadata) -> LLM:
        path = write_tiny_gguf(tokenizer__chat_template=template, llama__context_length=1024, **metadata)
        return LLM(str(path), **SMALL)

    return make


@pytest.fixture
def answers(load, monkeypatch):
    """Makes an LLM that writes the bytes of a text, whatever it samples, and then ends."""

    def make(text: str, template: str) -> LLM:
        llm = load(template)
        script = [*(byte_id(llm, byte) for byte in text.encode()), llm.tokenizer.eos_token_ids[0]]
        step = llm.engine.step

        def scripted():
            output = step()
            if output is not None:
                for i, state in enumerate(output.states):
                    at = len(state.owner.sum.token_ids)
                    output.token_ids[i] = script[at]
                output.finished = [
                    (state, FinishReason.STOP)
                    for state in output.states
                    if len(state.owner.sum.token_ids) == len(script) - 1
                ]
                for state, _ in output.finished:
                    llm.engine.abort(state.request.request_id)
            return output

        monkeypatch.setattr(llm.engine, "step", scripted)
        return llm

    return make


def byte_id(llm: LLM, byte: int) -> int:
    return next(i for i in range(llm.tokenizer.vocab_size) if llm.tokenizer.token_bytes(i) == bytes([byte]))


def free(num: int) -> SamplingParams:
    return SamplingParams(max_tokens=num, ignore_eos=True, seed=1)


def calls_of(calls: list[CallDelta]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json": {"enum": [1, 22]}}}, "1|22"),
        ({"response_format": {"type": "regex", "regex": "x+y"}}, "x+y"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}}, "7"),
    ],
)
def test_structured_output(load, options: dict, pattern: str):
    llm = load()
    for completions in (llm.generate("hell", PARAMS, **options), llm.chat(HELLO, PARAMS, **options)):
        (done,) = completions
        assert done.finish_reason is FinishReason.STOP
        assert re.fullmatch(pattern, done.text)


def test_choices_of_a_prompt_stand_side_by_side_and_differ(load):
    llm = load()
    prompts, params = ["hell", "he"], [free(12), free(9)]
    done = llm.generate(prompts, params, n=3)
    assert [len(c.token_ids) for c in done] == [12] * 3 + [9] * 3
    assert [c.prompt_token_ids for c in done] == [llm.tokenizer.encode(p) for p in prompts for _ in range(3)]
    assert len({tuple(c.token_ids) for c in done[:3]}) == 3
    assert [c.token_ids for c in llm.generate(prompts, params)] == [done[0].token_ids, done[3].token_ids]
    assert llm.chat(HELLO, free(8), n=2)[0].token_ids == llm.chat(HELLO, free(8))[0].token_ids


def test_log_probabilities_of_prompt_and_output(load):
    llm = load()
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (done,) = llm.chat(HELLO, params)
    assert [lp.token_id for lp in done.logprobs] == done.token_ids
    assert all(len(lp.top) == 2 for lp in done.logprobs)
    assert [lp.token_id for lp in done.prompt_logprobs] == done.prompt_token_ids[1:]


@pytest.mark.parametrize("template", [QWEN, LLAMA])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=["required", "named"]
)
def test_a_required_call(load, template: str, choice: str | dict):
    llm = load(template)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("get_weather", "get_time")
    ]
    for tool in tools:
        tool["function"]["parameters"]["additionalProperties"] = False
    (done,) = llm.chat(
        HELLO, SamplingParams(max_tokens=200, seed=2), tools=tools, tool_choice=choice, parallel_tool_calls=False
    )
    ((name, arguments),) = calls_of(done.tool_calls)
    assert name in (("get_weather", "get_time") if choice == "required" else ("get_time",))
    assert json.loads(arguments) == {}
    assert (done.text, done.finish_reason) == ("", FinishReason.STOP)


def test_calls_are_read_out_of_the_text(answers):
    (done,) = answers(f"I see.\n{CALL}\n{TIME_CALL}", QWEN).chat(HELLO, PARAMS_LONG, tools=TOOLS)
    assert done.text == "I see."
    assert calls_of(done.tool_calls) == [("get_weather", ARGUMENTS), ("get_time", ARGUMENTS)]
    (first,) = answers(CALL + TIME_CALL, QWEN).chat(HELLO, PARAMS_LONG, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(first.tool_calls) == [("get_weather", ARGUMENTS)]
    (plain,) = answers(CALL, QWEN).chat(HELLO, PARAMS_LONG)
    assert (plain.text, plain.tool_calls) == (CALL, ())


def test_reasoning(answers):
    text = "Hm.\n</think>\n\nFour."
    for more, reasoning, content in (
        ({}, "Hm.", "Four."),
        ({"include_reasoning": False}, "", "Four."),
        ({"chat_template_kwargs": {"thinking": False}}, "", text),
    ):
        (done,) = answers(text, THINKING).chat(HELLO, PARAMS_LONG, **more)
        assert (done.reasoning, done.text) == (reasoning, content)


def test_unsupported_fields_are_refused(load):
    llm = load()
    for options, says in (
        ({"m": 2}, "m is 2: extra inputs"),
        ({"n": 0}, "n is 0"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {}}, "has 0 of json, regex, choice"),
    ):
        with pytest.raises(CallboardError, match=says):
            llm.generate("hell", PARAMS, **options)
    for options, says in (
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"tools": [{"type": "custom"}]}, "tools.0.custom is missing"),
        ({"tool_choice": "required"}, "tool_choice is only allowed when there are tools"),
        ({"tools": TOOLS, "response_format": {"type": "regex", "regex": "a"}}, "set tool_choice to none"),
    ):
        with pytest.raises(CallboardError, match=says):
            llm.chat(HELLO, PARAMS, **options)
    channels = "{% for m in messages %}<|start|>assistant<|message|>{{ m.content }}{% endfor %}"
    with pytest.raises(CallboardError, match="tools cannot be used"):
        load(channels).chat(HELLO, PARAMS, tools=TOOLS)
    with pytest.raises(CallboardError, match="no chat template"):
        load(None).chat(HELLO)
    assert not llm.engine.has_work


def test_integers_of_any_library_are_ordinary_input(load):
    llm = load()
    params = SamplingParams(max_tokens=np.int64(4), seed=torch.tensor(3), prompt_logprobs=0)
    plain = SamplingParams(max_tokens=4, seed=3, prompt_logprobs=0)
    wanted = llm.generate([[5, 6, 7], [8, 9, 10]], plain, n=2, prompt_len=[2, 1])
    batches = (
        np.array([[5, 6, 7], [8, 9, 10]]),
        torch.tensor([[5, 6, 7], [8, 9, 10]]),
        [np.array([5, 6, 7]), [8, 9, 10]],
    )
    for prompts in batches:
        assert llm.generate(prompts, params, n=np.int64(2), prompt_len=np.array([2, 1])) == wanted
    for prompt in ([np.int64(5), 6, 7], np.array([5, 6, 7]), torch.tensor([5, 6, 7])):
        assert llm.generate(prompt, params, n=torch.tensor(2), prompt_len=torch.tensor(2)) == wanted[:2]


@pytest.mark.parametrize("prompt", [[1, 1.5], [1, True], [1, None], [1, 2**70], [[1.5]], [None], [torch.tensor([1.0])]])
def test_tokens_of_another_kind_are_refused(load, prompt):
    with pytest.raises(CallboardError, match=r"^The prompt(\[\d\])? is .*; it must be "):
        load().generate(prompt, PARAMS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 4.0), ("max_tokens", True), ("max_tokens", None), ("max_tokens", 2**70),
        ("seed", 1.5), ("seed", 2**63), ("top_k", "3"), ("temperature", "1"), ("temperature", float("nan")),
        ("temperature", True), ("stop_token_ids", (1.5,)), ("stop_token_ids", 5), ("stop_token_ids", (2**70,)),
        ("allowed_token_ids", "12"), ("logit_bias", (("a", 1.0),)), ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", ((1,),)), ("stop", ("\ud800",)), ("stop", 5), ("ignore_eos", 1), ("logprobs", np.array([1])),
    ],
    ids=str,
)  # fmt: skip
def test_parameters_of_another_kind_are_refused(field, value):
    with pytest.raises(CallboardError, match=rf"^(The token id of )?{field}(\[\d\])* is .*; it must be .*\.$"):
        SamplingParams(**{field: value})
