"""Versions of weights in requests and answers: `min_weight_version`, and `weight_versions` of each choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.base.types import FinishReason, Request, RequestOutput, SamplingParams
from runtime.base.weight_version import WeightVersion
from runtime.output.processor import OutputProcessor
from tests.support.http.chats import CALL, QWEN, TOOLS, send
from tests.support.http.fake_engine import (
    FakeEngine,
    assert_error,
    byte_tokenizer,
    chat,
    events_of,
    post,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def new_engine(*starts: tuple[int, str], **options) -> FakeEngine:
    return FakeEngine("Hello", weights=WeightVersion(), weight_versions=starts, **options)


def span(version: str, start: int, end: int) -> dict:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, chat())])
@pytest.mark.parametrize("n", [1, 2])
async def test_each_choice_has_its_versions(path: str, body: dict, n: int):
    engine = new_engine((0, "7"), (3, "8"))
    expected = [span("7", 0, 3), span("8", 3, 6)]  # with the end of sequence
    answer = (await post(engine, {**body, "n": n}, path)).json()
    assert [choice["weight_versions"] for choice in answer["choices"]] == [expected] * n
    chunks = [c for e in events_of(await post(engine, {**body, "n": n, "stream": True}, path)) for c in e["choices"]]
    last = [chunk for chunk in chunks if chunk["finish_reason"] is not None]
    assert [chunk["weight_versions"] for chunk in last] == [expected] * n
    assert not any("weight_versions" in chunk for chunk in chunks if chunk not in last)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, chat())])
async def test_fixed_weights_have_no_versions(path: str, body: dict):
    answer = await post(FakeEngine("Hello"), body, path)
    assert "weight_versions" not in answer.json()["choices"][0]


async def test_a_stop_string_cuts_the_versions():
    engine = new_engine((0, "7"), (2, "8"), (4, "9"), group=4)
    choice = (await post(engine, {"prompt": "a", "stop": "l", "return_token_ids": True}, COMPLETIONS)).json()[
        "choices"
    ][0]
    assert choice["weight_versions"] == [span("7", 0, 2), span("8", 2, 3)]
    assert len(choice["token_ids"]) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_has_its_versions(stream: bool):
    engine = FakeEngine(CALL, max_model_len=4096, weights=WeightVersion(), weight_versions=[(0, "7"), (9, "8")])
    response = await send(engine, QWEN, tools=TOOLS, stream=stream)
    choices = [c for e in events_of(response) for c in e["choices"]] if stream else response.json()["choices"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert choices[-1]["weight_versions"] == [span("7", 0, 9), span("8", 9, len(engine.script))]


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("abc")), max_size=6), st.integers(1, 12), st.data())
def test_spans_cover_the_output_once(entries: list[tuple[int, str]], num_tokens: int, data: st.DataObject):
    """Versions come as the front notes them, and outputs merge at random."""
    noted = [(0, "z"), *sorted({at: (at, name) for at, name in entries if at}.values())]
    processor = OutputProcessor(byte_tokenizer(), Request("r", [1], 1, SamplingParams(max_tokens=num_tokens)))
    at, deltas = 0, []
    while at < num_tokens:
        size = data.draw(st.integers(1, num_tokens - at))
        at += size
        reason = FinishReason.LENGTH if at == num_tokens else FinishReason.NONE
        known = [entry for entry in noted if entry[0] <= at]
        deltas.append(processor.process(RequestOutput("r", [65] * size, reason, weight_versions=known)))
    assert not any(delta.weight_versions for delta in deltas[:-1])
    expected = [next(name for start, name in reversed(noted) if start <= i) for i in range(num_tokens)]
    covered = [(s.version, i) for s in deltas[-1].weight_versions for i in range(s.start, s.end)]
    assert covered == list(zip(expected, range(num_tokens), strict=True))


@pytest.mark.parametrize(("wanted", "sent"), [("step 3", "step 3"), (3, "3"), (0, "0"), (None, "")])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}),
        (CHAT, chat()),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", chat(max_tokens=5)),
        ("/api/generate", {"model": "fake", "prompt": "hi", "stream": False}),
    ],
)
async def test_requests_name_the_oldest_weights(path: str, body: dict, wanted: str | int | None, sent: str):
    engine = new_engine()
    response = await post(engine, {**body, "min_weight_version": wanted}, path)
    assert response.status_code == 200, response.text
    assert {request.min_weight_version for request in engine.requests} == {sent}


async def test_a_bad_oldest_version_is_refused():
    for wanted in ("", -1, 1.5, True, ["a"], "a" * 257):
        refused = await post(new_engine(), {"prompt": "a", "min_weight_version": wanted})
        assert_error(refused, 400, "min_weight_version", "")
    refused = await post(FakeEngine(), {"prompt": "a", "min_weight_version": 1})
    assert_error(refused, 400, "min_weight_version", "--weight-updates")
