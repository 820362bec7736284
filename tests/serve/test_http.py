"""The HTTP front against a scripted engine: answers, streams, and every error's shape."""

import json
import pickle

import msgspec
import pytest

from actors.wire.engine_client import EngineRefusal, Refusal
from runtime.core.requests import choice_seed
from serve_app.apis.management.answers import Health
from serve_app.http.limits import is_long
from serve_app.protocol.errors import ApiError
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import EOS, MODEL, FakeEngine, assert_error, byte_tokenizer, chat, client_of, post

# ---- answers ---------------------------------------------------------------------------------------------------------


async def test_completion():
    engine = FakeEngine()
    response = await post(engine, {"model": MODEL, "prompt": "Say hello", "max_tokens": 50})
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["id"].startswith("cmpl-")
    ended = {"logprobs": None, "finish_reason": "stop", "stop_reason": None}
    seed = engine.requests[0].seed
    assert body["choices"] == [{"index": 0, "text": "Hello, wörld!", **ended, "seed": seed}]
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 15,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert engine.requests[0].token_ids == list(b"Say hello")
    assert engine.requests[0].prompt_len == 9


async def test_chat():
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = (await post(engine, chat(messages=messages), "/v1/chat/completions")).json()
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "Hello, wörld!", "refusal": None}
    ended = {"logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert body["choices"] == [{"index": 0, "message": message, **ended, "seed": engine.requests[0].seed}]
    assert bytes(engine.requests[0].token_ids) == b"<system>be brief<user>a\nb<assistant>"
    assert engine.requests[0].params.max_tokens == 128 - len(engine.requests[0].token_ids)  # all that fits


async def test_default_max_tokens_of_a_completion_is_16_or_less():
    engine = FakeEngine("x" * 99)
    assert (await post(engine, {"prompt": "a"})).json()["usage"]["completion_tokens"] == 16
    body = (await post(engine, {"prompt": "a" * 120})).json()
    assert body["usage"]["completion_tokens"] == 8
    assert body["choices"][0]["finish_reason"] == "length"


async def test_prompts_as_token_ids_and_in_lists():
    engine = FakeEngine("ok")
    for prompt, expected in [
        ([72, 105], [[72, 105]]),
        ([[72], [105, 106]], [[72], [105, 106]]),
        (["a", "bc"], [[97], [98, 99]]),
    ]:
        engine.requests.clear()
        body = (await post(engine, {"prompt": prompt, "max_tokens": 9})).json()
        assert [r.token_ids for r in engine.requests] == expected
        assert [c["index"] for c in body["choices"]] == list(range(len(expected)))
        assert [c["text"] for c in body["choices"]] == ["ok"] * len(expected)
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_n_choices_have_seeds_of_their_own():
    engine = FakeEngine()
    body = (await post(engine, {"prompt": ["a", "b"], "n": 3, "seed": -7})).json()
    assert [c["index"] for c in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == 2
    seeds = [r.seed for r in sorted(engine.requests, key=lambda r: int(r.request_id.rsplit("-")[-1]))]
    assert seeds == [choice_seed(-7 & (2**63 - 1), i) for i in range(3)] * 2
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_without_a_seed_each_request_gets_another():
    engine = FakeEngine()
    for _ in range(3):
        await post(engine, {"prompt": "a"})
    assert len({r.seed for r in engine.requests}) == 3


async def test_sampling_fields_reach_the_engine():
    engine = FakeEngine()
    fields = {
        "max_tokens": 9, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5,
        "frequency_penalty": -1, "presence_penalty": 1.5, "min_tokens": 2, "ignore_eos": True, "seed": 5,
    }  # fmt: skip
    extra = {"logit_bias": {"65": -100, "66": 1.5}, "stop_token_ids": [10], "priority": 3, "cache_salt": "me"}
    await post(engine, {"prompt": "a", "stop": "zz", "user": "u", "made_up": 1, **fields, **extra})
    request = engine.requests[0]
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert request.params.logit_bias == ((65, -100.0), (66, 1.5))
    assert request.params.stop_token_ids == (10,)
    assert request.params.stop == ("zz",)
    assert (request.seed, request.priority, request.cache_salt) == (5, 3, "me")


@pytest.mark.parametrize("group", [1, 3, 50])
async def test_stop_string_ends_the_text_and_aborts(group: int):
    engine = FakeEngine("one, two, three", group=group)
    body = (await post(engine, {"prompt": "a", "max_tokens": 40, "stop": ["two", "zzz"]})).json()
    assert body["choices"][0]["text"] == "one, "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len("one, two")  # later tokens were never requested
    assert len(engine.aborted) == (0 if group == 50 else 1)
    assert engine.num_running == 0
    included = {"prompt": "a", "max_tokens": 40, "stop": "two", "include_stop_str_in_output": True}
    assert (await post(engine, included)).json()["choices"][0]["text"] == "one, two"


async def test_end_token_is_counted_but_not_shown():
    engine = FakeEngine("ab")
    for more, text in [({}, "ab"), ({"skip_special_tokens": False}, "ab")]:
        body = (await post(engine, {"prompt": "a", **more})).json()
        assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == (text, 3)


async def test_echo():
    body = (await post(FakeEngine("cd"), {"prompt": ["a", "b"], "n": 2, "echo": True})).json()
    assert [c["text"] for c in body["choices"]] == ["acd", "acd", "bcd", "bcd"]
    assert (await post(FakeEngine("cd"), {"prompt": [97, EOS], "echo": True})).json()["choices"][0]["text"] == "acd"


async def test_completion_logprobs():
    body = (await post(FakeEngine("hé"), {"prompt": "a", "logprobs": 1})).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"A": -1.5, "h": -0.5}
    assert logprobs["text_offset"] == [0, 1, 1, 2]


async def test_chat_logprobs():
    response = await post(FakeEngine("hé"), chat(logprobs=True, top_logprobs=2), "/v1/chat/completions")
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[104], [0xC3], [0xA9], list(b"<eos>")]
    assert content[0]["logprob"] == -0.5
    assert [(t["token"], t["logprob"]) for t in content[0]["top_logprobs"]] == [("A", -1.5), ("B", -2.5)]


async def test_logprobs_end_with_the_stop_string():
    engine = FakeEngine("abcdef", group=10)
    body = (await post(engine, {"prompt": "a", "stop": "c", "logprobs": 0})).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]


async def test_a_server_scaled_to_zero_is_healthy():
    engine = FakeEngine()
    engine.engines = list
    async with client_of(engine) as client:
        for path, status in (("/health", "ok"), ("/ready", "ready")):
            response = await client.get(path)
            assert response.status_code == 200
            assert response.json()["status"] == status
            assert "scaled to zero" in response.json()["phase"]
            msgspec.convert(response.json(), Health)


async def test_models_and_health():
    engine = FakeEngine()
    async with client_of(engine) as client:
        body = (await client.get("/v1/models")).json()
        assert body["object"] == "list"
        assert body["data"][0]["id"] == MODEL
        assert body["data"][0]["max_model_len"] == 128
        assert (await client.get(f"/v1/models/{MODEL}")).json() == body["data"][0]
        assert (await client.get("/v1/models/other/one")).json()["error"]["code"] == "model_not_found"
        assert (await client.get("/health")).json() == {"status": "ok"}
        engine.reason = "The engine is restarting."
        response = await client.get("/health")
        assert response.status_code == 503
        assert response.json()["reason"] == "The engine is restarting."


async def test_a_long_prompt_is_prepared_in_a_thread():
    engine = FakeEngine("ok", max_model_len=1 << 20)
    body = (await post(engine, {"prompt": "a" * 200_000})).json()
    assert body["usage"]["prompt_tokens"] == 200_000


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "word " * 1500}, False),
        ({"prompt": "word " * 2500}, True),
        ({"prompt": [30000] * 2000}, False),
        ({"prompt": [30000] * 4000}, True),
        ({"prompt": [30000] * 10, "tools": []}, True),
        ({"prompt": [30000] * 2000, "stop": ["word " * 2500]}, True),
    ],
)
def test_only_long_requests_are_read_in_a_thread(body, expected):
    assert is_long(json.dumps(body).encode()) is expected


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": None}, "prompt", "should be a text"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": [1, "a"]}, "prompt.1", '"a"'),
        ({"prompt": ["a", 1]}, "prompt.1", "string"),
        ({"prompt": [[1], [-2]]}, "prompt.1.0", "-2"),
        ({"prompt": [1.5]}, "prompt.0", "1.5"),
        ({"prompt": [300]}, "prompt", "token id 300"),
        ({"prompt": ["a"] * 9, "n": 128}, "prompt", "1024"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": "5"}, "max_tokens", '"5"'),
        ({"max_tokens": True}, "max_tokens", "true"),
        ({"max_tokens": 1e400}, "max_tokens", "integer"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"n": 0}, "n", "0"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": [""]}, "stop.0", "at least 1"),
        ({"stop": 3}, "stop", "list of texts"),
        ({"stop": ["x"] * 65}, "stop", "64"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "not a token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "100"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "999"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "999"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "4"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ({"best_of": 2}, "best_of", "2"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"logprobs": 21}, "logprobs", "20"),
    ],
)
async def test_bad_completion_fields(fields: dict, param: str, says: str):
    engine = FakeEngine()
    async with client_of(engine) as client:
        body = json.dumps({"prompt": "a", **fields}).encode()
        assert_error(await client.post("/v1/completions", content=body), 400, param, says)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role", "robot"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "image_url",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
    ],
)
async def test_bad_chat_fields(fields: dict, param: str, says: str):
    assert_error(await post(FakeEngine(), chat(**fields), "/v1/chat/completions"), 400, param, says)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b'{"prompt": "a"', "invalid_json"),
        (b"\xff", "invalid_json"),
        (b"[" * 5000, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[1]", None),
    ],
)
async def test_malformed_json(body: bytes, code: str | None):
    async with client_of(FakeEngine()) as client:
        assert_error(await client.post("/v1/completions", content=body), 400, None, "The request body", code)


async def test_a_long_list_of_faults_is_one_error():
    body = {"prompt": [1, *["x"] * 100_000]}
    assert_error(await post(FakeEngine(), body), 400, "prompt.1", '"x"')


async def test_prompt_beyond_the_context():
    says, code = "maximum context length", "context_length_exceeded"
    assert_error(await post(FakeEngine(), {"prompt": "a" * 128}), 400, "prompt", says, code)
    assert_error(await post(FakeEngine(), {"prompt": "a" * 100, "max_tokens": 29}), 400, "prompt", says, code)
    assert (await post(FakeEngine(), {"prompt": "a" * 100, "max_tokens": 28})).status_code == 200
    long_chat = chat(messages=[{"role": "user", "content": "a" * 200}])
    assert_error(await post(FakeEngine(), long_chat, "/v1/chat/completions"), 400, "messages", says, code)


async def test_unknown_model():
    assert_error(await post(FakeEngine(), {"model": "x", "prompt": "a"}), 404, "model", "'x'", "model_not_found")


async def test_no_chat_template():
    async with client_of(FakeEngine(), byte_tokenizer(None)) as client:
        response = await client.post("/v1/chat/completions", json=chat())
    assert_error(response, 400, None, "no chat template")


async def test_template_refuses():
    tokenizer = byte_tokenizer("{{ raise_exception('Roles must alternate.') }}")
    async with client_of(FakeEngine(), tokenizer) as client:
        response = await client.post("/v1/chat/completions", json=chat())
    assert_error(response, 400, "messages", "Roles must alternate")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_busy_engine(stream: bool, n: int):
    engine = FakeEngine(busy=True)
    response = await post(engine, {"prompt": "a", "stream": stream, "n": n})
    assert_error(response, 429, None, "queue is full", "engine_busy")
    assert response.headers["retry-after"] == "2"
    assert engine.num_running == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_that_no_engine_can_serve_is_a_400(n: int):
    """For example, its engine ended when the request arrived, and the others have a shorter context."""
    engine = FakeEngine()

    async def refuse(request, on_engine=None):
        raise EngineRefusal("The prompt has 600 tokens; shorten the prompt.", Refusal.NEVER)
        yield

    engine.generate = refuse
    async with client_of(engine) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "n": n})
        samples = (await client.get("/metrics")).text
    assert_error(answer, 400, None, "shorten the prompt")
    assert f'callboard:requests_refused_total{{engine="0",model_name="{MODEL}",reason="never"}}' in samples
    assert f'callboard:requests_refused_total{{engine="0",model_name="{MODEL}",reason="never"}} 0.0' not in samples


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_away(stream: bool):
    engine = FakeEngine(reason="The engine is restarting.")
    response = await post(engine, {"prompt": "a", "stream": stream})
    assert_error(response, 503, None, "restarting", "engine_unavailable")
    assert response.headers["retry-after"] == "1"
    assert engine.requests == []


@pytest.mark.parametrize("n", [1, 3])
async def test_fault_of_one_request(n: int):
    engine = FakeEngine(fails_after=2)
    response = await post(engine, {"prompt": "a", "n": n})
    assert_error(response, 500, None, "no finite logits", "engine_error")


async def test_internal_error_has_no_traceback():
    engine = FakeEngine()
    engine.generate = None
    response = await post(engine, {"prompt": "a"})
    assert_error(response, 500, None, "internal error", "internal_error")


async def test_unknown_route_and_method():
    async with client_of(FakeEngine()) as client:
        assert_error(await client.get("/v1/nothing"), 404, None, "GET /v1/nothing", "not_found")
        response = await client.get("/v1/completions")
        assert_error(response, 405, None, "use POST", "method_not_allowed")


@pytest.mark.parametrize("declared", [True, False])
async def test_body_size_cap(declared: bool):
    async def chunks():
        for _ in range(33):
            yield b" " * (1 << 20)

    content = b" " * (HttpSettings().longest_body(False) + 1) if declared else chunks()
    async with client_of(FakeEngine()) as client:
        response = await client.post("/v1/completions", content=content)
    assert_error(response, 413, None, f"{HttpSettings().longest_body(False)} bytes", "body_too_large")


def test_errors_can_be_sent_to_another_process():
    error = ApiError(429, "Come back.", param="n", code="engine_busy", retry_after_s=2.0)
    assert error.body()["error"]["type"] == "rate_limit_error"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.retry_after_s, copy.body()) == (429, 2.0, error.body())
