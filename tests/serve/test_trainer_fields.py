"""What trainers read over HTTP: token ids without text, log-probabilities of sampling, scores, experts, seeds."""

import base64
import io

import numpy as np
import pytest

from runtime.base.types import CallboardError, FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from runtime.output.processor import OutputProcessor
from runtime.text.tokenizer import Tokenizer
from tests.support.http.fake_engine import EOS, FakeEngine, byte_tokenizer, chat, events_of, post

CHATS = "/v1/chat/completions"
QWEN = "{% for m in messages %}{{ m.content }}{% endfor %}"


async def answer(engine: FakeEngine, body: dict, path: str = "/v1/completions") -> dict:
    response = await post(engine, body, path)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(body: dict, path: str = "/v1/completions") -> tuple[str, str]:
    """The named field, and the sentence."""
    response = await post(FakeEngine(), body, path)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


# ---- log-probabilities of the distribution that tokens are drawn from ----


async def test_completions_show_sampling_log_probabilities():
    body = {"prompt": "ab", "max_tokens": 2, "logprobs": 0, "sampling_logprobs": True}
    found = (await answer(FakeEngine("xyz"), body))["choices"][0]["logprobs"]
    assert (found["token_logprobs"], found["sampling_logprobs"]) == ([-0.5, -0.5], [-0.25, -0.25])
    echoed = (await answer(FakeEngine("xyz"), body | {"echo": True}))["choices"][0]["logprobs"]
    assert echoed["sampling_logprobs"] == [None, None, -0.25, -0.25]
    plain = (await answer(FakeEngine("xyz"), {"prompt": "ab", "logprobs": 0}))["choices"][0]["logprobs"]
    assert "sampling_logprobs" not in plain


async def test_a_stream_shows_sampling_log_probabilities():
    body = {"prompt": "ab", "max_tokens": 2, "logprobs": 0, "sampling_logprobs": True, "stream": True}
    events = events_of(await post(FakeEngine("xyz"), body))
    assert [event["choices"][0]["logprobs"]["sampling_logprobs"] for event in events] == [[-0.25], [-0.25]]


async def test_chats_show_sampling_log_probabilities():
    body = chat(logprobs=True, max_tokens=2)
    entries = (await answer(FakeEngine("xyz"), body | {"sampling_logprobs": True}, CHATS))["choices"][0]["logprobs"]
    assert [entry["sampling_logprob"] for entry in entries["content"]] == [-0.25, -0.25]
    (entry, _) = (await answer(FakeEngine("xyz"), body, CHATS))["choices"][0]["logprobs"]["content"]
    assert "sampling_logprob" not in entry


@pytest.mark.parametrize("path", ["/v1/completions", CHATS])
async def test_they_need_log_probabilities(path: str):
    body = {"prompt": "ab"} if path == "/v1/completions" else chat()
    field, text = await refusal(body | {"sampling_logprobs": True}, path)
    assert (field, "send logprobs" in text) == ("sampling_logprobs", True)


# ---- token ids without text ----


@pytest.fixture
def no_text(monkeypatch):
    """A decoded token fails the test."""

    def fails(self, *args):
        raise AssertionError("a token was decoded")

    monkeypatch.setattr(Tokenizer, "token_bytes", fails)
    monkeypatch.setattr("runtime.text.stream.TextStream.push", fails)


NO_TEXT = {"max_tokens": 2, "return_token_ids": True, "detokenize": False}


async def test_a_completion_without_text(no_text):
    body = {"prompt": [97, 98], "logprobs": 1, "prompt_logprobs": 0, "echo": True, **NO_TEXT}
    choice = (await answer(FakeEngine("xyz"), body))["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [120, 121], [97, 98])
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in (97, 98, 120, 121)]
    assert choice["logprobs"]["token_logprobs"] == [None, -98 / 128, -0.5, -0.5]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -98 / 128, "rank": 3, "decoded_token": None}}]


async def test_a_stream_without_text(no_text):
    events = events_of(await post(FakeEngine("xyz"), {"prompt": [97], "stream": True, **NO_TEXT}))
    assert [(e["choices"][0]["text"], e["choices"][0]["token_ids"]) for e in events] == [("", [120]), ("", [121])]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_without_text(no_text, stream: bool):
    body = chat(logprobs=True, stream=stream) | NO_TEXT
    response = await post(FakeEngine("xyz"), body, CHATS)
    choices = [c for event in events_of(response) for c in event["choices"]] if stream else response.json()["choices"]
    assert [i for choice in choices for i in choice.get("token_ids", ())] == [120, 121]
    assert not any(choice.get("delta", choice.get("message"))["content"] for choice in choices)
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [(entry["token"], entry["bytes"]) for entry in entries] == [("token_id:120", None), ("token_id:121", None)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"detokenize": False}, "detokenize"),
        ({"detokenize": False, "return_token_ids": True, "stop": "x"}, "stop"),
        ({"detokenize": False, "return_token_ids": True, "tools": []}, None),
    ],
)
async def test_an_answer_without_text_needs_ids_and_no_stop_strings(fields: dict, param: str | None):
    if param is None:
        assert (await post(FakeEngine(), chat(**fields), CHATS)).status_code == 200
        return
    assert (await refusal({"prompt": "ab", **fields}))[0] == param


def test_a_processor_without_text_keeps_tokens_and_ends():
    params = SamplingParams(max_tokens=5, detokenize=False, logprobs=0)
    processor = OutputProcessor(byte_tokenizer(), Request("r", [97], 1, params))
    logprobs = [TokenLogprobs(120, -0.5, 1, ()), TokenLogprobs(EOS, -0.5, 1, ())]
    delta = processor.process(RequestOutput("r", [120, EOS], FinishReason.STOP, logprobs=logprobs))
    assert (delta.text, delta.token_ids, delta.ends, delta.finish_reason) == ("", [120, EOS], [0, 0], "stop")
    assert delta.logprobs == logprobs
    with pytest.raises(CallboardError, match="stop needs a text"):
        SamplingParams(detokenize=False, stop=("x",))


# ---- ids, ends and seeds ----


async def test_ids_in_and_out_with_the_sampled_log_probabilities():
    body = {"prompt": [[97, 98], [99]], "logprobs": 0, "return_token_ids": True}
    choices = (await answer(FakeEngine("xy"), body))["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [99]]
    assert [choice["token_ids"] for choice in choices] == [[120, 121, EOS]] * 2
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[-0.5] * 3] * 2
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 2


async def test_each_choice_names_the_seed_that_repeats_it():
    engine = FakeEngine("xy")
    choices = (await answer(engine, {"prompt": [97], "n": 4, "seed": 11}))["choices"]
    seeds = [choice["seed"] for choice in choices]
    assert seeds == [request.seed for request in engine.requests]
    assert len(set(seeds)) == 4
    assert seeds[0] == 11
    for seed in seeds:
        (again,) = (await answer(engine, {"prompt": [97], "seed": seed}))["choices"]
        assert again["seed"] == engine.requests[-1].seed == seed


# ---- scores of an output ----


async def test_an_output_is_scored_behind_its_prompt():
    engine = FakeEngine("xyz")
    body = {"prompt": [97, 98, 99], "prompt_len": 1, "max_tokens": 0, "prompt_logprobs": 0, "return_token_ids": True}
    choice = (await answer(engine, body))["choices"][0]
    (request,) = engine.requests
    assert (request.token_ids, request.prompt_len, request.params.max_tokens) == ([97, 98, 99], 1, 0)
    scores = [None if entry is None else next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"]]
    assert (choice["token_ids"], scores) == ([], [None, -98 / 128, -99 / 128])


async def test_new_tokens_follow_a_scored_output():
    engine = FakeEngine("xyz")
    body = {"prompt": [[97, 98, 99], [97, 98]], "prompt_len": [1, 2], "max_tokens": 2, "echo": True, "logprobs": 0}
    choices = (await answer(engine, body))["choices"]
    assert [(request.prompt_len, request.params.max_tokens) for request in engine.requests] == [(1, 4), (2, 2)]
    assert [choice["text"] for choice in choices] == ["abcxy", "abxy"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_len": 1},  # nothing is scored
        {"prompt_len": 0, "prompt_logprobs": 0},
        {"prompt_len": 4, "prompt_logprobs": 0},
        {"prompt_len": [1, 1], "prompt_logprobs": 0},
        {"prompt_len": 1, "prompt_logprobs": 0, "truncate_prompt_tokens": 2},
    ],
)
async def test_a_faulty_prompt_len_is_refused(fields: dict):
    assert (await refusal({"prompt": [97, 98, 99], **fields}))[0].startswith("prompt_len")


# ---- experts ----


def experts_of(choice: dict) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


@pytest.mark.parametrize("path", ["/v1/completions", CHATS])
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_the_experts_of_their_tokens(path: str, stream: bool):
    engine = FakeEngine("xyz", routed_experts=(3, 2))
    body = ({"prompt": [97, 98]} if path == "/v1/completions" else chat()) | {"max_tokens": 2, "routed_experts": True}
    response = await post(engine, body | {"stream": stream}, path)
    choices = [c for event in events_of(response) for c in event["choices"]] if stream else response.json()["choices"]
    assert all("routed_experts" not in choice for choice in choices[:-1])
    found = experts_of(choices[-1])
    assert (found.shape, found.dtype) == ((len(engine.requests[0].token_ids) + 1, 3, 2), np.int16)
    assert (found == np.arange(len(found))[:, None, None]).all()


async def test_experts_need_the_setting_of_the_server():
    field, text = await refusal({"prompt": "ab", "routed_experts": True})
    assert (field, "--routed-experts" in text) == ("routed_experts", True)
    plain = (await answer(FakeEngine(routed_experts=(3, 2)), {"prompt": "ab"}))["choices"][0]
    assert "routed_experts" not in plain
