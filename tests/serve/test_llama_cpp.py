"""llama.cpp's routes, by bodies as its editor plug-ins send them."""

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from runtime.base.model.pooling import Pooling
from runtime.output.processor import Delta
from runtime.text.tokenizer import Tokenizer
from serve_app.apis.completions.fill_in_middle import of_other_files
from serve_app.apis.llama_cpp.line_limits import LineLimits
from tests.support.http.chats import QWEN
from tests.support.http.fake_engine import EOS, GAP_MARKS, MODEL, FakeEngine, byte_tokenizer, client_of

TIMINGS = ["prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"]
CHUNKS = [
    {"text": "def one():\n    return 1\n", "time": [12, 34], "filename": "one.py"},
    {"text": "def two():\n    return 2\n", "time": [12, 35], "filename": "two.py"},
]
VIM = {
    "id_slot": 0,
    "input_prefix": "def add(a, b):\n",
    "input_suffix": "\n\nprint(add(1, 2))\n",
    "input_extra": CHUNKS,
    "prompt": "    ret",
    "n_predict": 64,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": ["content", *(f"timings/{name}" for name in TIMINGS), "truncated", "tokens_cached"],
    "model": "",
}
VIM_WARM_UP = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": CHUNKS,
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "stream": False,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
VSCODE = {
    "input_prefix": "const a = 1;\n",
    "input_suffix": "\nconsole.log(b);\n",
    "input_extra": [{"text": "let c = 3;\n", "time": 1732900000000, "filename": "c.ts"}],
    "prompt": "const b",
    "n_predict": 64,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}
VSCODE_EDIT = {
    "messages": [{"role": "user", "content": "hi"}],
    "stream": False,
    "cache_prompt": True,
    "samplers": "edkypmxt",
    "temperature": 0.8,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "max_tokens": -1,
    "timings_per_token": False,
}
VIM_INSTRUCT = {
    "id_slot": 3,
    "messages": [{"role": "user", "content": "hi"}],
    "min_p": 0.1,
    "temperature": 0.1,
    "samplers": ["min_p", "temperature"],
    "stream": True,
    "cache_prompt": True,
    "model": "",
}
CONTINUE = {"prompt": "hi", "stream": True, "n_predict": 20, "temperature": 0.5, "stop": ["zz"], "top_k": 3}


def marked(num_marks: int = len(GAP_MARKS)) -> Tokenizer:
    return byte_tokenizer(QWEN, GAP_MARKS[:num_marks])


async def post(
    path: str, body: dict[str, Any], engine: FakeEngine | None = None, tokenizer: Tokenizer | None = None
) -> httpx.Response:
    async with client_of(engine or engine_of(), tokenizer or marked()) as client:
        return await client.post(path, json=body)


def engine_of(text: str = "urn a + b", **options: Any) -> FakeEngine:
    return FakeEngine(text, **{"max_model_len": 4096, **options})


def prompt_of(engine: FakeEngine) -> str:
    return marked().decode(engine.requests[-1].token_ids, skip_special_tokens=False)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")
    assert end == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


# ---- plug-ins --------------------------------------------------------------------------------------------------------


async def test_llama_vim_fills_in():
    engine = engine_of()
    response = await post("/infill", VIM, engine)
    answer = response.json()
    assert answer["content"] == "urn a + b"
    assert set(answer) == {*VIM["response_fields"]}
    assert answer["timings/predicted_n"] == len("urn a + b") + 1
    files = "<|file_sep|>one.py\ndef one():\n    return 1\n<|file_sep|>two.py\ndef two():\n    return 2\n"
    here = "<|fim_prefix|>def add(a, b):\n<|fim_suffix|>\n\nprint(add(1, 2))\n<|fim_middle|>    ret"
    assert prompt_of(engine) == f"<|repo_name|>repository\n{files}<|file_sep|>file\n{here}"
    params = engine.requests[0].params
    assert (params.max_tokens, params.top_k, params.top_p, params.temperature) == (64, 40, 0.9, 1.0)
    assert {marked().token_to_id(mark) for mark in GAP_MARKS} == set(params.stop_token_ids)
    assert set(response.headers["x-callboard-ignored-fields"].split(", ")) == {
        "id_slot",
        "cache_prompt",
        "t_max_prompt_ms",
    }


async def test_llama_vim_warms_up():
    engine = engine_of()
    response = await post("/infill", VIM_WARM_UP, engine)
    assert (response.status_code, response.json()) == (200, {})
    assert engine.requests[0].params.max_tokens == 1
    whole = (await post("/infill", VIM_WARM_UP | {"response_fields": None})).json()
    assert (whole["content"], whole["tokens_predicted"], whole["stop_type"]) == ("", 0, "limit")


async def test_llama_vscode_fills_in():
    answer = (await post("/infill", VSCODE, engine_of(" = 2;"))).json()
    assert (answer["content"], answer["stop_type"], answer["stop"]) == (" = 2;", "eos", True)
    assert set(answer["timings"]) >= set(TIMINGS)


@pytest.mark.parametrize("body", [VSCODE_EDIT, VIM_INSTRUCT])
async def test_editors_send_chats(body: dict[str, Any]):
    engine = engine_of("Hi!")
    response = await post("/v1/chat/completions", body, engine)
    assert response.status_code == 200, response.text
    filtered = "top_p" in body
    assert (engine.requests[0].params.top_p, engine.requests[0].params.min_p) == (
        (0.95, 0.05) if filtered else (1, 0.1)
    )


@pytest.mark.parametrize("path", ["/completion", "/completions"])
@pytest.mark.parametrize("group", [1, 1000])
async def test_continue_streams_a_completion(path: str, group: int):
    engine = engine_of("Hello, wörld!", group=group)
    *events, end = events_of(await post(path, CONTINUE, engine))
    assert "".join(event["content"] for event in events) == "Hello, wörld!"
    assert all(event["stop"] is False for event in events)
    assert (end["stop"], end["content"], end["stop_type"], end["model"]) == (True, "", "eos", MODEL)
    params = engine.requests[0].params
    assert (params.max_tokens, params.temperature, params.stop, params.top_k) == (20, 0.5, ("zz",), 3)


async def test_the_end_of_a_stream_is_marked_whatever_is_wanted():
    *_, end = events_of(await post("/completion", CONTINUE | {"response_fields": ["timings/prompt_n"]}))
    assert (end["stop"], end["content"], "timings/prompt_n" in end) == (True, "", True)


# ---- fields ----------------------------------------------------------------------------------------------------------


async def test_fields_have_names_of_their_own():
    fields = {"n_predict": -1, "repeat_penalty": 1.5, "seed": 7, "logit_bias": [[5, -1.5], [6, False]]}
    engine = engine_of()
    answer = (await post("/completion", {"prompt": "hi", **fields, "return_tokens": True}, engine)).json()
    request = engine.requests[0]
    assert (request.params.max_tokens, request.params.repetition_penalty, request.seed) == (4094, 1.5, 7)
    assert request.params.logit_bias == ((5, -1.5), (6, -100))
    assert (answer["tokens"], answer["tokens_evaluated"]) == ([*b"urn a + b", EOS], 2)
    assert answer["generation_settings"]["seed"] == 7
    assert answer["prompt"] == "hi"


async def test_names_of_completions_work_too():
    engine = engine_of("xy")
    answer = await post("/completion", {"prompt": "hi", "max_tokens": 2, "logprobs": 1, "gap": {}, "x": 1}, engine)
    assert (answer.json()["tokens_predicted"], len(answer.json()["completion_probabilities"])) == (2, 2)
    assert answer.headers["x-callboard-ignored-fields"] == "x"


async def test_several_prompts_make_a_list():
    answers = (await post("/completion", {"prompt": ["a", "b"], "n_cmpl": 2, "n_predict": 3})).json()
    assert [(answer["index"], answer["stop_type"]) for answer in answers] == [(i, "limit") for i in range(4)]


async def test_a_stop_word_is_named():
    answer = (await post("/completion", {"prompt": {"prompt_string": "hi"}, "stop": ["+"]})).json()
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("urn a ", "word", "+")


async def test_scores_have_ids():
    answer = (await post("/completion", {"prompt": "hi", "n_probs": 2}, engine_of("xy"))).json()
    first = answer["completion_probabilities"][0]
    assert (first["id"], first["token"], first["logprob"]) == (ord("x"), "x", -0.5)
    assert [top["id"] for top in first["top_logprobs"]] == [65, 66]


@pytest.mark.usefixtures("shared_compiler")
async def test_a_schema_binds_the_text():
    engine = engine_of("{}")
    assert (await post("/completion", {"prompt": "hi", "json_schema": {"type": "object"}}, engine)).status_code == 200
    assert engine.requests[0].params.grammar is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mirostat": 2}, "mirostat is 2: it would change the answer but is not supported"),
        ({"n_predict": "x"}, "n_predict is"),
        ({"n_predict": 5000}, "This model's maximum context length is 4096 tokens"),
        ({"repeat_penalty": 0}, "repeat_penalty is 0"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n is 64, but penalties look at all tokens"),
        ({"logit_bias": [["a", 1]]}, "logit_bias.0 is"),
        ({"n_probs": 50}, "n_probs is 50"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora is"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aa"]}}, "multimodal_data is"),
        ({"prompt": [1, "a"]}, "prompt.1 is"),
    ],
)
async def test_faults_have_llama_cpps_shape(fields: dict[str, Any], message: str):
    response = await post("/completion", {"prompt": "hi", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert error["message"].startswith(message), error


async def test_a_tokenizer_without_marks_is_refused():
    response = await post("/infill", VSCODE, tokenizer=byte_tokenizer())
    assert response.status_code == 400
    assert "lacks fill-in-the-middle marks" in response.json()["error"]["message"]


async def test_other_files_need_no_marks():
    engine = engine_of()
    await post("/infill", VIM, engine, marked(3))
    assert prompt_of(engine).startswith(f"{CHUNKS[0]['text']}{CHUNKS[1]['text']}<|fim_prefix|>")


@pytest.mark.parametrize("room", [100, 200, 400])
async def test_a_full_context_keeps_what_is_near(room: int):
    engine = engine_of(max_model_len=room)
    body = VSCODE | {"input_prefix": "x" * 300 + "NEAR", "input_suffix": "HERE" + "y" * 300, "n_predict": 20}
    assert (await post("/infill", body, engine)).status_code == 200
    assert engine.requests[0].prompt_len <= room - 20
    assert "NEAR<|fim_suffix|>HERE" in prompt_of(engine)


def test_long_files_are_not_encoded_to_their_end(monkeypatch: pytest.MonkeyPatch):
    tokenizer, encoded = marked(), list[int]()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, special=True: encoded.append(len(text)) or encode(text))
    assert of_other_files(tokenizer, [("long", "x" * 5_000_000), ("short", "y")], 200)
    assert max(encoded) < 100_000


# ---- limits of lines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a\n    b\n    c", None),
        ("a\n    b\nc", "a\n    b"),
        ("a\n    b\n\n\n  c", "a\n    b"),
        ("a\n\n    b", None),
        ("a\n\t\t\t\tb", None),
        ("a\nb", "a"),
    ],
)
def test_less_indentation_ends_a_text(text: str, kept: str | None, size: int):
    limits, shown, ended = LineLimits(indentation=4), "", False
    for at in range(0, len(text), size):
        delta = Delta(0, text[at : at + size])
        limits(delta)
        shown += delta.text
        if ended := delta.finish_reason == "stop":
            break
    assert ended == (kept is not None)
    assert shown.rstrip() == (text if kept is None else kept)


def test_time_ends_a_text_after_its_first_line(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr("serve_app.apis.llama_cpp.line_limits.time", SimpleNamespace(monotonic=lambda: now))
    limits = LineLimits(max_ms=250)
    for seconds, text, reason in ((0.0, "a", None), (0.3, "b", None), (0.1, "c\n", "length")):
        now += seconds
        delta = Delta(0, text)
        limits(delta)
        assert (delta.text, delta.finish_reason) == (text, reason)


# ---- other routes ----------------------------------------------------------------------------------------------------


async def test_props_and_slots():
    async with client_of(engine_of(), marked()) as client:
        props, slots = (await client.get("/props")).json(), (await client.get("/slots")).json()
        assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert (props["total_slots"], props["model_alias"], props["chat_template"]) == (64, MODEL, QWEN)
    assert len(slots) == 64
    assert not any(slot["is_processing"] for slot in slots)


async def test_a_server_that_loads_is_told_apart():
    engine = engine_of(reason="The model is loading.")
    async with client_of(engine, marked()) as client:
        response = await client.get("/props")
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "unavailable_error"


async def test_tokens_in_both_forms():
    ids = (await post("/tokenize", {"content": "h<|fim_pad|>"})).json()
    assert ids == {"tokens": [ord("h"), marked().token_to_id("<|fim_pad|>")]}
    pieces = (await post("/tokenize", {"content": "hö", "with_pieces": True})).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == ["h", [0xC3], [0xB6]]
    text = (await post("/detokenize", {"tokens": [104, 105]})).json()
    assert text == {"prompt": "hi", "content": "hi"}


async def test_the_template_is_applied():
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await post("/apply-template", body)).json() == {"prompt": "<|user|>hi<|assistant|>"}


async def test_embeddings_stand_in_lists():
    engine = FakeEngine(pooling=Pooling("mean"), makes_text=False)
    for path, field in (("/embedding", "content"), ("/embeddings", "input")):
        found = (await post(path, {field: "aab"}, engine)).json()
        assert found == [{"index": 0, "embedding": [[2.0, 1.0, 0.0, 0.0]]}]
    refused = await post("/embedding", {"content": "a", "embd_normalize": 0}, engine)
    assert refused.json()["error"]["code"] == 400
