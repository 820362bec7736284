"""A stream that is taken up after any event continues with the bytes of the undisturbed stream."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.support.http.chats import CALL, QWEN, THINKING, TIME_CALL, TOOLS
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of

pytestmark = pytest.mark.usefixtures("shared_compiler")
WANTED = {"X-Callboard-Event-Ids": "true"}
HI = [{"role": "user", "content": "hi"}]
FLAT = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
ANTHROPIC = [{"name": f["name"], "description": "", "input_schema": f["parameters"]} for f in FLAT]
CALLS = f"Let me look.\n{CALL}\n{TIME_CALL}"
THOUGHTS = f"hm, wörld\n</think>\n\nSo: {CALL}"
STOPPED = "one two three STOP four"
CHAT, COMPLETION, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
CASES: list[tuple[str, str, str, dict[str, Any]]] = [  # path, the model's text, its template, fields
    (COMPLETION, "Hello, wörld!", QWEN, {"prompt": "a", "max_tokens": 40}),
    (COMPLETION, "Hello", QWEN, {"prompt": ["a", "b"], "n": 2, "max_tokens": 40, "return_token_ids": True}),
    (COMPLETION, "Hello", QWEN, {"prompt": "ab", "logprobs": 2, "echo": True, "max_tokens": 40}),
    (COMPLETION, STOPPED, QWEN, {"prompt": "a", "stop": ["STOP"], "max_tokens": 40}),
    (COMPLETION, "Hello", QWEN, {"prompt": "a", "max_tokens": 3, "return_draft_spans": True}),
    (CHAT, "Hello, wörld!", QWEN, {"messages": HI}),
    (CHAT, CALLS, QWEN, {"messages": HI, "tools": TOOLS, "n": 2}),
    (CHAT, THOUGHTS, THINKING, {"messages": HI, "tools": TOOLS, "logprobs": True, "top_logprobs": 1}),
    (CHAT, STOPPED, QWEN, {"messages": HI, "stop": "STOP"}),
    (MESSAGES, STOPPED, QWEN, {"messages": HI, "max_tokens": 99, "stop_sequences": ["STOP"]}),
    (MESSAGES, THOUGHTS, THINKING, {"messages": HI, "max_tokens": 999, "tools": ANTHROPIC}),
    (RESPONSES, "Hello, wörld!", QWEN, {"input": "hi"}),
    (RESPONSES, THOUGHTS, THINKING, {"input": "hi", "tools": FLAT}),
    (RESPONSES, "Hi", QWEN, {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
]
_NAMES = [f"{path.rpartition('/')[2]}{i}" for i, (path, *_) in enumerate(CASES)]


def client(text: str, template: str, group: int, **options: Any) -> httpx.AsyncClient:
    engine = FakeEngine(text, group=group, max_model_len=4096, **options)
    return client_of(engine, tokenizer=byte_tokenizer(template))


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    options = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETION) else {}
    return {"model": MODEL, "stream": True, **options, **fields}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any], last: str = "") -> list[tuple[str, str]]:
    """Return the id and the text of each event, without times."""
    headers = {"Last-Event-ID": last} if last else WANTED
    response = await http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    pieces = response.text.split("\n\n")
    assert pieces.pop() == ""
    found = [re.fullmatch(r"id: (\S+)\n(.*)", piece, re.DOTALL).groups() for piece in pieces]
    return [(i, re.sub(r'"(created|created_at|completed_at)":\d+', "", text)) for i, text in found]


def rest_of_choices(pieces: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the events of each choice, in order. Choices may mix in any order."""
    found: dict[str, list[str]] = {}
    for _, text in pieces:
        index = re.search(r'"choices":\[\{"index":(\d+)', text)
        found.setdefault(index[1] if index else "", []).append(text)
    return found


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("path", "text", "template", "fields"), CASES, ids=_NAMES)
async def test_resumed_bytes_are_the_rest(path: str, text: str, template: str, fields: dict[str, Any], group: int):
    body = body_of(path, fields)
    async with client(text, template, group) as http:
        whole = await events(http, path, body)
    assert len({i for i, _ in whole}) == len(whole)
    for other in (1, 2, 1000):  # however the tokens arrive when the stream is taken up
        async with client(text, template, other) as http:
            for cut in range(0, len(whole), 1 if other == 2 else 7):
                rest = await events(http, path, body, whole[cut][0])
                if len(fields.get("prompt", "a")) == 1 and fields.get("n", 1) == 1:
                    assert rest == whole[cut + 1 :]
                assert rest_of_choices(rest) == rest_of_choices(whole[cut + 1 :])


@pytest.mark.parametrize(("path", "text", "template", "fields"), CASES, ids=_NAMES)
async def test_an_answer_with_ids_is_the_answer_without(path: str, text: str, template: str, fields: dict[str, Any]):
    """The events differ only in their number. Without the header no event has an id."""
    body = body_of(path, {**fields, "seed": [1, 2] if isinstance(fields.get("prompt"), list) else 1})
    async with client(text, template, 1) as http:
        pieces = [text for _, text in await events(http, path, body)]
        plain = (await http.post(path, json=body)).text
    assert not re.search("^id:", plain, re.MULTILINE)
    parts = r'"(?:text|content|arguments|partial_json|thinking|reasoning|delta)":"((?:[^"\\]|\\.)*)"'
    assert "".join(re.findall(parts, "".join(pieces))) == "".join(re.findall(parts, plain))


async def test_draft_tokens_are_counted_as_without_ids():
    body = body_of(COMPLETION, {"prompt": "a", "max_tokens": 40, "return_draft_spans": True})
    usages, characters = [], []
    async with client_of(FakeEngine("Hello, wörld!", group=4, num_wrong=2), draft="d") as http:
        for headers in ({}, WANTED):
            text = (await http.post(COMPLETION, json=body, headers=headers)).text
            found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            usages.append(found[-1]["usage"])
            spans = [span for event in found[:-1] for span in event["choices"][0]["draft_spans"]]
            characters.append({i for start, end in spans for i in range(start, end)})
    assert usages[0] == usages[1]
    assert characters[0] == characters[1] != set()


async def test_a_stream_that_was_taken_up_can_be_taken_up_again():
    body = body_of(CHAT, {"messages": HI})
    async with client("Hello", QWEN, 1) as http:
        whole = await events(http, CHAT, body)
        rest = await events(http, CHAT, body, whole[2][0])
        assert await events(http, CHAT, body, rest[1][0]) == whole[5:]


async def test_engine_learns_which_requests_to_keep_and_to_resume():
    engine = FakeEngine("Hello", max_model_len=4096)
    async with client_of(engine, tokenizer=byte_tokenizer(QWEN)) as http:
        body = body_of(CHAT, {"messages": HI})
        whole = await events(http, CHAT, body)
        await events(http, CHAT, body, whole[1][0])
        await http.post(CHAT, json=body)
    first, second, plain = engine.requests
    assert (first.keeps_output, first.resumes, second.keeps_output, second.resumes) == (True, False, True, True)
    assert (first.request_id, first.seed, first.token_ids) == (second.request_id, second.seed, second.token_ids)
    assert (plain.keeps_output, plain.resumes) == (False, False)


@pytest.mark.parametrize("path", [CHAT, COMPLETION, MESSAGES, RESPONSES])
async def test_an_id_of_another_request_is_refused(path: str):
    fields = {CHAT: {"messages": HI}, COMPLETION: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}
    body = body_of(path, {"max_tokens": 9, "messages": HI} if path == MESSAGES else fields[path])
    async with client("Hello", QWEN, 1) as http:
        last = (await events(http, path, body))[1][0]
        others = (body | {"temperature": 0.5}, last), (body, last + "-1"), (body, last.replace(".", "1.", 1))
        for changed, asked in others:
            response = await http.post(path, json=changed, headers={"Last-Event-ID": asked})
            assert response.status_code == 400
            assert "Last-Event-ID belongs to another request" in response.json()["error"]["message"]
        for wrong in ("17", "a.b.c.d", "x" * 400, last + "x"):
            response = await http.post(path, json=body, headers={"Last-Event-ID": wrong})
            assert response.status_code == 400
            assert "which is no id of this server" in response.json()["error"]["message"]
        unstreamed = {**body, "stream": False, "stream_options": None}
        plain = await http.post(path, json=unstreamed, headers={"Last-Event-ID": last})
        assert "only allowed when stream is true" in plain.json()["error"]["message"]


async def test_too_many_choices_have_no_ids():
    async with client("Hello", QWEN, 1) as http:
        body = body_of(COMPLETION, {"prompt": ["a"] * 65})
        response = await http.post(COMPLETION, json=body, headers=WANTED)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Callboard-Event-Ids")


async def test_lines_of_ollama_have_no_ids():
    async with client("Hello", QWEN, 1) as http:
        response = await http.post("/api/chat", json={"model": MODEL, "messages": HI}, headers=WANTED)
    assert [json.loads(line)["done"] for line in response.text.splitlines()][-2:] == [False, True]


async def test_an_error_within_a_stream_has_no_id():
    """So the client's last event is still the place where the stream goes on."""
    async with client("Hello", QWEN, 1, fails_after=3) as http:
        response = await http.post(CHAT, json=body_of(CHAT, {"messages": HI}), headers=WANTED)
    *_, event, error, done, _ = response.text.split("\n\n")
    assert event.startswith("id: ")
    assert error.startswith('data: {"error"')
    assert done == "data: [DONE]"


async def test_background_streams_have_ids_and_go_on_elsewhere():
    body = body_of(RESPONSES, {"input": "hi", "background": True})
    async with client("Hello", QWEN, 2) as http:
        whole = await events(http, RESPONSES, body)
    async with client("Hello", QWEN, 1) as http:
        for cut in range(len(whole)):
            assert await events(http, RESPONSES, body, whole[cut][0]) == whole[cut + 1 :]
