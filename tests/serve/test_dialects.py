"""Limits, names and remedies of one API do not hold on another; tools and fields that are only offered are left out."""

import re
from typing import Any

import pytest

from serve_app.apis.anthropic.request import FIELDS_OF_CHATS, MessagesRequest
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.completions.request import CompletionRequest
from serve_app.apis.llama_cpp.request import LlamaCompletionRequest
from serve_app.apis.ollama.request import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from serve_app.apis.responses.request import ResponsesRequest
from serve_app.protocol.other_servers import UNSUPPORTED_FIELDS
from tests.support.http.chats import CALL, QWEN
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, OLLAMA, GENERATE, LLAMA = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/completion",
)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    COUNT: {"messages": HI},
    OLLAMA: {"model": MODEL, "messages": HI, "stream": False},
    GENERATE: {"model": MODEL, "prompt": "hi", "stream": False},
    LLAMA: {"prompt": "hi"},
}
SHARED = set(ChatRequest.model_fields) - FIELDS_OF_CHATS
OPTIONS = {f"options.{name}" for name in OllamaOptions.model_fields}
FIELDS = {
    CHAT: {*ChatRequest.model_fields, "tool_calls"},
    COMPLETIONS: set(CompletionRequest.model_fields),
    RESPONSES: set(ResponsesRequest.model_fields),
    MESSAGES: {*MessagesRequest.model_fields, *SHARED},
    OLLAMA: {*OllamaChatRequest.model_fields, *OPTIONS, *SHARED, "tool_calls"} - OllamaChatRequest.unknown_fields,
    GENERATE: {*OllamaGenerateRequest.model_fields, *OPTIONS, *SHARED} - OllamaGenerateRequest.unknown_fields,
    LLAMA: {*LlamaCompletionRequest.model_fields, *CompletionRequest.model_fields},
}
KINDS = ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, OllamaChatRequest, OllamaGenerateRequest
WORDS = {name for kind in KINDS for name in kind.model_fields} | UNSUPPORTED_FIELDS.keys() | OPTIONS
ENGLISH = {"model", "system", "format", "input", "n", "context", "text", "stop", "image", "images", "task", "options"}
ENGLISH |= {"template", "conversation"}


def function(path: str, name: str) -> dict[str, Any]:
    if path in (MESSAGES, COUNT):
        return {"name": name, "input_schema": {"type": "object"}}
    own = {"name": name, "parameters": {"type": "object"}}
    return {"type": "function", **own} if path == RESPONSES else {"type": "function", "function": own}


async def post(path: str, engine: FakeEngine | None = None, **fields: Any) -> Any:
    engine = engine or FakeEngine("Hello", max_model_len=1 << 20)
    async with client_of(engine, byte_tokenizer(QWEN)) as client:
        return await client.post(path, json=BODIES[path] | fields)


def error_of(answer: Any) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def words_of_others(path: str, remedy: str) -> set[str]:
    """Return fields of other APIs that a remedy names, unless it names the route for them."""
    named = {word.rstrip(".") for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", re.sub(r"\S*/\S+", "", remedy))}
    if re.search(r"(/v1|/api)/", remedy):
        return set()
    heads = {word if word.startswith("options.") else word.partition(".")[0] for word in named}
    return {word for word in heads & WORDS if word not in FIELDS[path]} - (ENGLISH - {"stop", "input"})


@pytest.mark.parametrize("path", FIELDS)
async def test_remedies_name_fields_of_the_called_api(path: str):
    faults, engine = {}, FakeEngine("Hello", max_model_len=1 << 20)
    async with client_of(engine, byte_tokenizer(QWEN)) as client:
        for name in sorted((WORDS | {"mirostat", "input_ids"}) - FIELDS[path] - OPTIONS):
            answer = await client.post(path, json=BODIES[path] | {name: "something"})
            if answer.status_code != 200:
                text = error_of(answer)
                assert text.startswith(name), (name, text)
                if others := words_of_others(path, text.rpartition("; ")[2] if "; " in text else ""):
                    faults[name] = (text, others)
    assert not faults


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (OLLAMA, {"options": {"mirostat": 2}}, "send options.temperature and options.top_p"),
        (OLLAMA, {"max_new_tokens": 3}, "send options.num_predict"),
        (OLLAMA, {"options": {"stop": ["a"] * 99}}, "options.stop has 99 stop strings"),
        (OLLAMA, {"options": {"num_predict": 2 << 20}}, "or lower options.num_predict"),
        (MESSAGES, {"stop_sequences": ["a"] * 99}, "stop_sequences has 99 stop strings"),
        (MESSAGES, {"response_format": {"type": "text"}}, "response_format is no field of Anthropic's requests"),
        (MESSAGES, {"guided_regex": "a", "x": 1}, "send structured_outputs.regex"),
        (MESSAGES, {"tools": [{"name": "f", "type": "x", "input_schema": {}}]}, "of the type custom"),
        (MESSAGES, {"stop_regex": "a"}, "send stop_sequences"),
        (RESPONSES, {"sampling_logprobs": True}, "send include and top_logprobs, too"),
        (RESPONSES, {"messages": HI}, "messages is [{"),
        (RESPONSES, {"tools": [{"type": "x", "name": "f", "parameters": {}}]}, "of the type function or custom"),
        (RESPONSES, {"min_tokens": 1, "text": {"format": {"type": "json_object"}}}, "combined with text.format,"),
        (OLLAMA, {"min_tokens": 1, "format": "json"}, "combined with format,"),
        (LLAMA, {"max_new_tokens": 3}, "send n_predict"),
        (LLAMA, {"top_n_tokens": 3}, "send n_probs"),
        (LLAMA, {"n": 0}, "n_cmpl is 0"),
        (LLAMA, {"guided_json": {}}, "send structured_outputs.json"),
        (COMPLETIONS, {"messages": HI}, "send it to /v1/chat/completions"),
    ],
)
async def test_errors_use_the_words_of_the_called_api(path: str, fields: dict[str, Any], says: str):
    assert says in error_of(await post(path, **fields))


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "longest"), [(CHAT, 64), (RESPONSES, 128), (MESSAGES, 128), (COUNT, 128), (OLLAMA, 512)]
)
async def test_names_of_tools_have_the_limit_of_their_api(path: str, longest: int):
    assert (await post(path, tools=[function(path, "a" * longest)])).status_code == 200
    assert "tools.0" in error_of(await post(path, tools=[function(path, "a" * (longest + 1))]))
    for name in ("time.get-current", "a b/c", 'ü"\\'):
        answer = await post(path, tools=[function(path, name)])
        assert answer.status_code == (200 if path == OLLAMA else 400), answer.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, COUNT, OLLAMA])
async def test_only_chats_of_openai_limit_the_number_of_tools(path: str):
    answer = await post(path, tools=[function(path, f"f{i}") for i in range(228)])
    if path == CHAT:
        assert error_of(answer) == "tools has 228 tools; this API allows 128."
    else:
        assert answer.status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_top_p_zero_is_greedy(path: str):
    engine = FakeEngine("Hello")
    assert (await post(path, engine, top_p=0, temperature=1.5)).status_code == 200
    assert engine.requests[0].params.temperature == 0.0


async def test_options_of_ollama_have_its_limits():
    engine = FakeEngine("Hello")
    options = {"top_p": 0, "top_k": -5, "seed": -1, "presence_penalty": 3.5, "frequency_penalty": -3.5}
    assert (await post(OLLAMA, engine, options=options)).status_code == 200
    (request,) = engine.requests
    assert (request.params.temperature, request.params.top_k, request.params.presence_penalty) == (0.0, 0, 3.5)
    assert request.seed >= 0
    for path in (CHAT, COMPLETIONS):
        assert "between -2 and 2" in error_of(await post(path, presence_penalty=3.5))


async def test_a_calls_name_is_escaped_and_read_back():
    name = 'say "hi"\\ü'
    call = CALL.replace("get_weather", 'say \\"hi\\"\\\\ü')
    answer = await post(OLLAMA, FakeEngine(call, max_model_len=1 << 16), tools=[function(OLLAMA, name)])
    assert [each["function"]["name"] for each in answer.json()["message"]["tool_calls"]] == [name]


# ---- fields and tools that are only offered --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"verbosity": "low", "reasoning_effort": "high"}, "verbosity, reasoning_effort"),
        (CHAT, {"truncation": "auto", "tools": [{"type": "web_search"}]}, "truncation, tools.web_search"),
        (COMPLETIONS, {"reasoning_effort": "low"}, "reasoning_effort"),
        (RESPONSES, {"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}}, "text.verbosity, reasoning.effort"),
        (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
        (RESPONSES, {"tools": [{"type": "web_search", "external_web_access": True}]}, "tools.web_search"),
        (RESPONSES, {"tools": [{"type": "namespace", "name": "m", "tools": [{"type": "mcp"}]}]}, "tools.mcp"),
        (MESSAGES, {"context_management": {"edits": []}}, None),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, None),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        (MESSAGES, {"mcp_servers": [{"url": "x"}], "container": "c"}, "mcp_servers, container"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools.web_search_20250305"),
        (COUNT, {"tools": [{"type": "computer_20250124", "name": "computer"}]}, None),
        (OLLAMA, {"truncate": True, "shift": True, "think": "high"}, "truncate, shift, think"),
    ],
)
async def test_what_is_only_offered_is_left_out(path: str, fields: dict[str, Any], ignored: str | None):
    answer = await post(path, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-callboard-ignored-fields") == ignored


async def test_own_tools_work_beside_left_out_ones():
    engine = FakeEngine(CALL, max_model_len=1 << 16)
    tools = [{"type": "web_search"}, function(RESPONSES, "get_weather"), {"type": "local_shell"}]
    answer = await post(RESPONSES, engine, tools=tools)
    assert [item["name"] for item in answer.json()["output"]] == ["get_weather"]
    assert "web_search" not in bytes(engine.requests[0].token_ids).decode()
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    await post(RESPONSES, engine, tools=tools, tool_choice=allowed)
    assert "get_weather" not in bytes(engine.requests[1].token_ids).decode()


@pytest.mark.parametrize(
    ("path", "tool", "choice"),
    [
        (CHAT, {"type": "web_search"}, "required"),
        (RESPONSES, {"type": "web_search"}, "required"),
        (RESPONSES, {"type": "web_search"}, {"type": "web_search"}),
        (
            RESPONSES,
            {"type": "mcp"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "x"}]},
        ),
        (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}, {"type": "any"}),
        (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}, {"type": "tool", "name": "web_search"}),
    ],
)
async def test_a_demanded_tool_of_another_server_is_refused(path: str, tool: dict[str, Any], choice: Any):
    assert error_of(await post(path, tools=[tool], tool_choice=choice)).startswith("tool_choice")


async def test_older_and_other_names_of_fields():
    schema = {"type": "json_schema", "schema": {"type": "object", "x-unknown": 1}}
    engine = FakeEngine("Hello", max_model_len=1 << 16)
    assert (await post(OLLAMA, engine, max_output_tokens=2)).json()["eval_count"] == 2
    assert "output_format" not in (await post(MESSAGES, output_format=schema)).headers
    grammar = "root ::= [a-z]"
    same = await post(CHAT, guided_grammar=grammar, structured_outputs={"grammar": grammar})
    assert same.status_code == 200, same.text
    other = await post(CHAT, guided_grammar=grammar, structured_outputs={"grammar": "root ::= [0-9]"})
    assert "constrains the output as" in error_of(other)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "a", "seed": 1 << 80}),
        ("/completion", {"prompt": "a", "top_k": 1 << 80}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "seed": -(1 << 80)}),
        ("/api/generate", {"model": MODEL, "prompt": "a", "options": {"seed": 1 << 80}}),
        ("/api/chat", {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "options": {"seed": 1 << 80}}),
        ("/v1/messages", {"max_tokens": 1 << 80, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "seed": 1 << 80}),
    ],
)
async def test_integers_of_more_than_64_bits_are_refused(path: str, body: dict):
    async with client_of(FakeEngine(), byte_tokenizer(QWEN)) as client:
        assert (await client.post(path, json=body)).status_code == 400
