"""Ollama's API, by the shapes that its documentation shows."""

import json
from datetime import datetime
from typing import Any

import httpx
import pytest

from runtime.base.types import FinishReason
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.chats import CALL, PLAIN, QWEN, THINKING, TIME_CALL, TOOLS
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of
from tests.support.structured.cases import fits

pytestmark = pytest.mark.usefixtures("shared_compiler")
HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ASK = {"model": MODEL, "prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def engine_of(text: str = "Hello, wörld!", **options: Any) -> FakeEngine:
    return FakeEngine(text, **{"max_model_len": 4096, **options})


async def post(engine: FakeEngine, path: str, body: dict[str, Any], template: str | None = QWEN) -> httpx.Response:
    async with client_of(engine, byte_tokenizer(template)) as client:
        return await client.post(path, json=body)


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("}\n")
    return [json.loads(line) for line in response.text.splitlines()]


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.requests[-1].token_ids).decode()


def check_end(line: dict[str, Any], reason: str = "stop") -> None:
    assert (line["done"], line["done_reason"], line["model"]) == (True, reason, MODEL)
    assert all(isinstance(line[name], int) and line[name] >= 0 for name in DURATIONS)
    assert line["total_duration"] == line["prompt_eval_duration"] + line["eval_duration"]
    assert datetime.fromisoformat(line["created_at"]).tzinfo is not None


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 1000])
async def test_a_chat_is_streamed_in_lines(group: int):
    engine = engine_of(group=group)
    *lines, end = lines_of(await post(engine, "/api/chat", HI))
    assert all((line["model"], line["done"]) == (MODEL, False) for line in lines)
    assert {line["message"]["role"] for line in [*lines, end]} == {"assistant"}
    assert "".join(line["message"]["content"] for line in lines) == "Hello, wörld!"
    assert end["message"]["content"] == ""
    check_end(end)
    assert end["prompt_eval_count"] == engine.requests[0].prompt_len
    assert end["eval_count"] == len("Hello, wörld!".encode()) + 1
    assert prompt_of(engine) == "<|user|>hi<|assistant|>"


async def test_a_plain_chat_is_one_object():
    response = await post(engine_of(), "/api/chat", HI | {"stream": False})
    answer = response.json()
    assert response.headers["content-type"] == "application/json"
    assert answer["message"] == {"role": "assistant", "content": "Hello, wörld!"}
    check_end(answer)
    limited = HI | {"stream": False, "options": {"num_predict": 3}}
    check_end((await post(engine_of(), "/api/chat", limited)).json(), "length")


async def test_a_prompt_is_answered_as_a_chat():
    engine = engine_of()
    *lines, end = lines_of(await post(engine, "/api/generate", ASK | {"system": "be brief"}))
    assert "".join(line["response"] for line in lines) == "Hello, wörld!"
    assert end["response"] == ""
    check_end(end)
    assert prompt_of(engine) == "<|system|>be brief<|user|>hi<|assistant|>"
    answer = (await post(engine, "/api/generate", ASK | {"stream": False})).json()
    assert answer["response"] == "Hello, wörld!"
    check_end(answer)


async def test_a_raw_prompt_uses_no_template():
    for template in (QWEN, None):
        engine = engine_of()
        answer = await post(engine, "/api/generate", ASK | {"raw": True, "stream": False}, template)
        assert answer.json()["response"] == "Hello, wörld!"
        assert prompt_of(engine) == "hi"
    refused = await post(engine_of(), "/api/generate", ASK | {"raw": True, "system": "x"})
    assert refused.json() == {"error": "system cannot be combined with raw, which has no template."}


@pytest.mark.parametrize(("path", "body"), [("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})])
async def test_an_empty_request_loads_the_model(path: str, body: dict[str, Any]):
    engine = engine_of()
    answer = (await post(engine, path, {"model": MODEL, "keep_alive": "5m", **body})).json()
    assert (answer["done"], answer["done_reason"], engine.requests) == (True, "load", [])
    unknown = await post(engine, path, {"model": "other", **body})
    assert unknown.status_code == 404
    assert unknown.json() == {"error": "There is no model 'other' here; this server has 'fake'."}


async def test_the_latest_tag_may_be_missing():
    for served, asked in ((MODEL, f"{MODEL}:latest"), (f"{MODEL}:latest", MODEL)):
        service = Service(engine_of(), byte_tokenizer(QWEN), served)
        transport = httpx.ASGITransport(build_http_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/api/chat", json=HI | {"model": asked, "stream": False})
        assert (answer.status_code, answer.json()["model"]) == (200, served)


async def test_only_the_served_model_can_be_pulled():
    for body in ({"model": MODEL}, {"name": f"{MODEL}:latest", "stream": False}):
        assert (await post(engine_of(), "/api/pull", body)).json() == {"status": "success"}
    refused = await post(engine_of(), "/api/pull", {"model": "llama3.2:1b"})
    text = "There is no model 'llama3.2:1b' here; this server has 'fake', and it fetches no others; run "
    assert (refused.status_code, refused.json()) == (404, {"error": text + "`callboard serve` with that model."})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:00"),
    ],
)
async def test_models_cannot_be_changed(method: str, path: str):
    async with client_of(engine_of(), byte_tokenizer(QWEN)) as client:
        response = await client.request(method, path, json={"model": "x"})
    assert response.status_code == 400
    assert response.json()["error"].startswith("This server has the model that it was started with, and cannot ")


async def test_lists_have_the_fields_that_clients_read():
    async with client_of(engine_of(), byte_tokenizer(QWEN)) as client:
        tags, running = [(await client.get(path)).json()["models"][0] for path in ("/api/tags", "/api/ps")]
        shown = (await client.post("/api/show", json={"model": MODEL})).json()
        version = (await client.get("/api/version")).json()["version"]
    details = {"parent_model", "format", "family", "families", "parameter_size", "quantization_level"}
    assert {"name", "model", "modified_at", "size", "digest"} < tags.keys() < running.keys()
    assert details == tags["details"].keys() == running["details"].keys() == shown["details"].keys()
    assert int(datetime.fromisoformat(running["expires_at"]).timestamp()) > 0
    assert (running["context_length"], running["size_vram"]) == (4096, 0)
    assert {"modelfile", "parameters", "template", "model_info", "capabilities", "modified_at"} < shown.keys()
    assert tuple(map(int, version.split("."))) >= (0, 9, 0)


# ---- fields ----------------------------------------------------------------------------------------------------------


async def test_options_are_sampling_parameters():
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "num_predict": 9}
    options |= {"stop": ["zz"], "repeat_penalty": 1.1, "num_ctx": 4096, "presence_penalty": 0.5}
    engine = engine_of()
    response = await post(engine, "/api/chat", HI | {"options": options, "keep_alive": -1})
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.max_tokens, params.stop, params.repetition_penalty) == (9, ("zz",), 1.1)
    assert (params.presence_penalty, engine.requests[0].seed) == (0.5, 7)
    assert response.headers["x-callboard-ignored-fields"] == "keep_alive, options.num_ctx"
    await post(engine, "/api/chat", HI | {"options": {"num_predict": -1}})
    assert engine.requests[1].params.max_tokens == 4096 - engine.requests[1].prompt_len


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat is 2: it would change the answer but"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature is -1"),
        ("/api/chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0"),
        ("/api/chat", {"options": {"repeat_penalty": 2, "repeat_last_n": 64}}, "options.repeat_last_n is 64, but"),
        ("/api/chat", {"options": {"num_predict": 5000}}, "This model's maximum context length is 4096 tokens"),
        ("/api/chat", {"messages": [{"role": "user", "content": "", "images": ["aa"]}]}, "messages.0.images.0 is"),
        ("/api/chat", {"messages": [{"role": "user"}, {"role": "x"}]}, "messages.1.role is"),
        ("/api/chat", {"format": "xml"}, "format is"),
        ("/api/chat", {"format": {"type": "strange"}}, "format"),
        ("/api/chat", {"n": 2}, "n is no field of Ollama's requests"),
        ("/api/generate", {"images": ["aa"]}, 'images.0 is "image", but the model "fake" takes no'),
        ("/api/generate", {"images": ["aa"], "raw": True}, "images cannot be combined with raw"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template is"),
        ("/api/generate", {"context": [1, 2]}, "context is [1, 2]: it is not supported"),
        ("/api/generate", {"tools": TOOLS}, "tools is no field of Ollama's requests"),
        ("/api/generate", {"prompt": "x" * 5000}, "This model's maximum context length is 4096 tokens, but prompt"),
        ("/api/generate", {"model": None}, "model is null"),
        ("/api/show", {"model": "other"}, "There is no model 'other' here"),
        ("/api/show", {}, "model is missing"),
    ],
)
async def test_faults_name_the_field(path: str, fields: dict[str, Any], message: str):
    body = {"/api/chat": HI, "/api/generate": ASK, "/api/show": {}}[path] | fields
    response = await post(engine_of(), path, body)
    assert response.status_code in (400, 404)
    (error,) = response.json().values()
    assert error.startswith(message), error


@pytest.mark.parametrize(("path", "body"), [("/api/chat", HI), ("/api/generate", ASK)])
async def test_a_format_binds_the_answer(path: str, body: dict[str, Any]):
    engine = engine_of('{"a":1}')
    for form, right, wrong in (("json", '{"b": []}', "[1]"), (SCHEMA, '{"a":1}', '{"a":"x"}')):
        assert (await post(engine, path, body | {"format": form})).status_code == 200
        grammar = engine.requests[-1].params.grammar
        assert grammar is not None
        assert fits(grammar, right)
        assert not fits(grammar, wrong)


@pytest.mark.parametrize("think", [None, True, False])
async def test_thinking_is_separate_from_the_content(think: bool | None):
    engine = engine_of("<think>\nHm.\n</think>\n\nHi!" if think is False else "Hm.\n</think>\n\nHi!")
    fields = {} if think is None else {"think": think}
    lines = lines_of(await post(engine, "/api/chat", HI | fields, THINKING))
    plain = (await post(engine, "/api/chat", HI | fields | {"stream": False}, THINKING)).json()["message"]
    thoughts = "".join(line["message"].get("thinking", "") for line in lines)
    assert (thoughts, "".join(line["message"]["content"] for line in lines)) == ("" if think is False else "Hm.", "Hi!")
    assert plain == {"role": "assistant", "content": "Hi!", **({} if think is False else {"thinking": "Hm."})}
    assert prompt_of(engine).endswith("<think></think>" if think is False else "<think>\n")
    text = (await post(engine, "/api/generate", ASK | fields | {"stream": False}, THINKING)).json()
    assert (text["response"], text.get("thinking", "")) == ("Hi!", thoughts)


async def test_log_probabilities():
    fields = {"logprobs": True, "top_logprobs": 1}
    for path, body in (("/api/chat", HI), ("/api/generate", ASK), ("/api/generate", ASK | {"raw": True})):
        *lines, _ = lines_of(await post(engine_of("xy"), path, body | fields))
        plain = (await post(engine_of("xy"), path, body | fields | {"stream": False})).json()
        entries = [entry for line in lines for entry in line.get("logprobs", ())]
        assert entries == plain["logprobs"]
        assert [(entry["token"], entry["logprob"]) for entry in entries[:2]] == [("x", -0.5), ("y", -0.5)]
        assert len(entries[0]["top_logprobs"]) == 1


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [QWEN, PLAIN], ids=["hermes", "generic"])
@pytest.mark.parametrize("group", [1, 1000])
async def test_calls_are_whole_lines(template: str, group: int):
    engine = engine_of(f"Let me see.\n{CALL}\n{TIME_CALL}", group=group)
    lines = lines_of(await post(engine, "/api/chat", HI | {"tools": TOOLS}, template))
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    plain = (await post(engine, "/api/chat", HI | {"tools": TOOLS, "stream": False}, template)).json()
    wanted = [{"name": name, "arguments": {"city": "Zürich"}} for name in ("get_weather", "get_time")]
    assert [call["function"] for call in calls] == wanted
    assert [call["function"] for call in plain["message"]["tool_calls"]] == wanted
    assert "".join(line["message"]["content"] for line in lines) == plain["message"]["content"] == "Let me see."
    check_end(lines[-1])


async def test_results_are_matched_to_their_calls():
    functions = [{"function": {"name": name, "arguments": {"city": "Zürich"}}} for name in ("get_weather", "get_time")]
    called = {"role": "assistant", "content": "", "tool_calls": functions}
    for tools in (
        [{"content": "sunny", "tool_name": "get_weather"}, {"content": "noon", "tool_name": "get_time"}],
        [{"content": "sunny"}, {"content": "noon"}],
    ):
        engine = engine_of()
        messages = [*HI["messages"], called, *({"role": "tool", **tool} for tool in tools)]
        assert (await post(engine, "/api/chat", HI | {"messages": messages, "tools": TOOLS})).status_code == 200
        assert prompt_of(engine).endswith(
            f"{CALL}{TIME_CALL}<|tool get_weather|>sunny[call_1_0]<|tool get_time|>noon[call_1_1]<|assistant|>"
        )


async def test_a_started_answer_goes_on():
    engine = engine_of()
    await post(engine, "/api/chat", HI | {"messages": [*HI["messages"], {"role": "assistant", "content": "Well,"}]})
    assert prompt_of(engine).endswith("<|assistant|>Well,")


# ---- errors and models -----------------------------------------------------------------------------------------------


async def test_an_error_within_a_stream_is_a_line():
    engine = engine_of(fails_after=3, failure=(FinishReason.ERROR, "The model gave no finite logits."))
    *_, last = lines_of(await post(engine, "/api/chat", HI))
    assert last == {"error": "The model gave no finite logits."}


async def test_a_waiting_client_gets_empty_texts():
    service = Service(engine_of(delay_s=0.2), byte_tokenizer(QWEN), MODEL)
    app = build_http_app(service, HttpSettings(keep_alive_s=0.05))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        lines = lines_of(await client.post("/api/chat", json=HI | {"options": {"num_predict": 1}}))
    assert len(lines) > 2
    assert "".join(line["message"]["content"] for line in lines) == "H"
    check_end(lines[-1], "length")


async def test_models_are_listed_and_shown():
    engine = engine_of()
    await engine.adapters.load("own", "/adapters/own")
    async with client_of(engine, byte_tokenizer(THINKING)) as client:
        models = (await client.get("/api/tags")).json()["models"]
        assert (await client.get("/api/ps")).json()["models"][0]["name"] == MODEL
        shown = (await client.post("/api/show", json={"model": MODEL})).json()
        assert (await client.post("/api/show", json={"name": "own"})).json()["details"]["parent_model"] == MODEL
        version = (await client.get("/api/version")).json()["version"]
        missing = await client.get("/api/nothing")
    assert [model["name"] for model in models] == [model["model"] for model in models] == [MODEL, "own"]
    assert datetime.fromisoformat(models[0]["modified_at"]).tzinfo is not None
    assert models[0]["digest"] != models[1]["digest"]
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 4096
    assert shown["template"] == THINKING
    assert tuple(map(int, version.split("."))) > (0, 6, 4)  # clients require a version above it
    assert (missing.status_code, list(missing.json())) == (404, ["error"])
    assert isinstance(missing.json()["error"], str)
