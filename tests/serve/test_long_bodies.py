"""Bodies with very many values: token ids are read a piece at a time, all else is bounded."""

import json

import pytest

from runtime.text.stream import StopStrings, TextStream
from serve_app.apis.chat.endpoint import CHAT
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.completions.request import CompletionRequest
from serve_app.protocol.parsing import parse
from serve_app.protocol.shapes import MAX_VALUES
from serve_app.service.service import Service
from tests.support.http.fake_engine import MODEL, FakeEngine, assert_error, byte_tokenizer, chat, client_of, post

IDS = [i % 1000 for i in range(100_000)]


def prompt_of(body: bytes):
    return parse(CompletionRequest, body).prompt


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("prompt", [IDS, [IDS], [IDS, [1], IDS[:70_000]], [[i] for i in range(1000)] + [IDS]])
def test_long_prompts_of_token_ids(prompt: list, indent: int | None):
    fields = {"user": '"prompt":[1]', "prompt": prompt, "stop": ["a", '\\"'], "n": 2}
    request = parse(CompletionRequest, json.dumps(fields, indent=indent).encode())
    assert (request.prompt, request.stop, request.n) == (prompt, ["a", '\\"'], 2)
    assert request.user == fields["user"]
    assert request.prompts() == (prompt if isinstance(prompt[0], list) else [prompt])


def test_the_last_of_two_prompts_counts():
    assert prompt_of(b'{"prompt":"a",' + json.dumps({"prompt": IDS}).encode()[1:]) == IDS


@pytest.mark.parametrize(
    ("prompt", "param", "says"),
    [
        ([*IDS, -1], "prompt.100000", "-1"),
        ([*IDS, 1 << 31], "prompt.100000", "2147483648"),
        ([*IDS, 1.0], "prompt.100000", "1.0"),
        ([*IDS[:50_000], True, *IDS], "prompt.50000", "true"),
        ([*IDS, [1]], "prompt.100000", "[1]"),
        ([*IDS[:70_000], "a,b" * 40_000], "prompt", "token id"),
        ([IDS, 123], "prompt.1", "at least one"),
        ([IDS, []], "prompt.1", "at least one"),
        ([IDS, [1, "x"]], "prompt.1.1", '"x"'),
        ([[i] for i in range(1025)] + [IDS], "prompt", "1026 lists; at most 1024"),
    ],
)
async def test_faults_in_long_prompts(prompt: list, param: str, says: str):
    assert_error(await post(FakeEngine(), {"prompt": prompt}), 400, param, says)


async def test_brackets_in_strings_are_not_counted_as_values():
    text = '{"a": [1, 2], "b\\\\": "\\""}, ' * 5000
    assert prompt_of(json.dumps({"prompt": text}).encode()) == text
    assert prompt_of(json.dumps({"prompt": [text, "a,"] * 300}).encode()) == [text, "a,"] * 300
    body = chat(messages=[{"role": "user", "content": text}] * 20)
    response = await post(FakeEngine(), body, "/v1/chat/completions")
    assert_error(response, 400, "messages", "context length", "context_length_exceeded")


@pytest.mark.parametrize("field", ["made_up", "stop_token_ids"])
@pytest.mark.parametrize("value", [*([v] * MAX_VALUES for v in ([], {}, "x")), {str(i): 1 for i in range(MAX_VALUES)}])
async def test_too_many_values(field: str, value: object):
    body = {"prompt": "a" * 70_000, field: value}
    assert_error(await post(FakeEngine(), body), 400, None, f"over {MAX_VALUES} values")


async def test_a_list_to_detokenize_is_read_in_pieces():
    body = {"tokens": [ord("a")] * 100_000}
    assert (await post(FakeEngine(), body, "/detokenize")).json()["prompt"] == "a" * 100_000


async def test_arguments_with_half_a_character_stay_text():
    """The escape of a surrogate is valid in the JSON that a model wrote, and in the body that has it as a text."""
    engine = FakeEngine(max_model_len=500)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":"\\ud800"}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    service = Service(engine, byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"), MODEL)
    body = json.dumps({"messages": messages}).encode()
    prepared = service.prepare(CHAT, parse(ChatRequest, body))
    written = json.dumps(call["function"]).encode()
    assert bytes(prepared.requests[0].token_ids) == b"hi<tool_call>\n" + written + b"\n</tool_call>"


async def test_many_values_in_arguments():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps([[]] * 30_000)}}
    body = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    response = await post(FakeEngine(), body, "/v1/chat/completions")
    assert_error(response, 400, "messages.0.tool_calls.0.function.arguments", f"at most {MAX_VALUES} values")


async def test_logit_bias_names_each_token_once():
    for bias, param in [({"065": 1}, "logit_bias.065"), ({str(i): 1 for i in range(1025)}, "logit_bias")]:
        assert_error(await post(FakeEngine(), {"prompt": "a", "logit_bias": bias}), 400, param, "logit_bias")
    engine = FakeEngine()
    assert (await post(engine, {"prompt": ["a", "b"], "n": 2, "logit_bias": {"65": 1, "0": 2}})).status_code == 200
    biases = [request.params.logit_bias for request in engine.requests]
    assert biases == [((65, 1.0), (0, 2.0))] * 4
    assert len({id(bias) for bias in biases}) == 1


async def test_choices_share_their_stop_strings(monkeypatch: pytest.MonkeyPatch):
    made, make = [], StopStrings.__init__
    monkeypatch.setattr(StopStrings, "__init__", lambda self, stops: (made.append(stops), make(self, stops))[1])
    response = await post(FakeEngine(), {"prompt": ["a", "b"], "n": 4, "stop": ["lo", "x"]})
    assert [choice["text"] for choice in response.json()["choices"]] == ["Hel"] * 8
    assert made == [("lo", "x")]
    alike = StopStrings(["b"])
    streams = [TextStream(byte_tokenizer(), alike) for _ in range(2)]
    assert [stream.push(b"ab")[0] for stream in streams] == ["a", "a"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": [[7] * 5000] * 8, "n": 128}, "n", "40000 tokens of prompt for 128 choices each"),
        ({"prompt": [[7] * 5000] * 801}, "prompt", "4005000 tokens of prompt"),
        ({"prompt": [7] * 13_000, "prompt_logprobs": 20}, "prompt_logprobs", "21 log-probabilities at each of 13000"),
        ({"prompt": [7] * 13_000, "n": 20, "prompt_logprobs": 1}, "prompt_logprobs", "2 log-probabilities at each"),
        ({"prompt": [7] * 13_000, "echo": True, "logprobs": 20}, "logprobs", "21 log-probabilities at each of 13000"),
    ],
)
async def test_a_request_with_too_much_work_is_refused(fields: dict, param: str, says: str):
    engine = FakeEngine(max_model_len=131_072)
    assert_error(await post(engine, {"max_tokens": 1, **fields}), 400, param, says)
    assert engine.requests == []


@pytest.mark.parametrize(("n", "status"), [(3, 200), (4, 400)])
async def test_predictions_count_for_each_choice(n: int, status: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serve_app.service.checks.MAX_PROMPT_TOKENS", 400)
    engine = FakeEngine()
    fields = {"max_tokens": 1, "n": n, "prediction": {"type": "content", "content": "a" * 100}}
    async with client_of(engine, draft="ngram") as client:
        response = await client.post("/v1/chat/completions", json=chat(**fields))
    assert response.status_code == status
    if status == 400:
        assert_error(response, 400, "n", "and 100 of prediction for 4 choices each")
