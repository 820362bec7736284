"""How each field of a request changes the answer, and which fields are refused, ignored or capped."""

import hashlib

import pytest

from runtime.base.types import Request
from tests.support.http.fake_engine import EOS, FakeEngine, assert_error, chat, events_of, post

PATHS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": chat()}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_object_and_chunk_names_the_system(path: str, stream: bool):
    response = await post(FakeEngine(), {**PATHS[path], "stream": stream}, path)
    objects = events_of(response) if stream else [response.json()]
    assert {o["system_fingerprint"] for o in objects} == {"fp_f"}
    assert all("stop_reason" in choice for o in objects for choice in o["choices"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({}, "Hello, wörld!", ("stop", None)),
        ({"max_tokens": 4}, "Hell", ("length", None)),
        ({"stop": ["zz", "lo"]}, "Hel", ("stop", "lo")),
        ({"stop": "lo", "include_stop_str_in_output": True}, "Hello", ("stop", "lo")),
        ({"stop_token_ids": [ord("o")]}, "Hell", ("stop", ord("o"))),
        ({"stop_token_ids": [ord("o")], "include_stop_str_in_output": True}, "Hello", ("stop", ord("o"))),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "Hello, wörld!<eos>", ("stop", None)),
    ],
)
async def test_stop_reason(stream: bool, fields: dict, text: str, reason: tuple):
    response = await post(FakeEngine(group=2), {"prompt": "a", "max_tokens": 40, "stream": stream, **fields})
    choices = [o["choices"][0] for o in (events_of(response) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == text
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == reason
    assert all((c["finish_reason"], c["stop_reason"]) == (None, None) for c in choices[:-1])


async def test_a_stop_string_may_end_in_a_broken_character():
    engine = FakeEngine()
    engine.script = [97, 0xC3, EOS]
    choice = (await post(engine, {"prompt": "a", "stop": "\ufffd"})).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", "\ufffd")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
async def test_token_ids_of_a_stream(path: str, n: int):
    body = {**PATHS[path], "n": n, "return_token_ids": True, "stop": "w", "max_tokens": 40}
    plain = (await post(FakeEngine(), body, path)).json()
    events = events_of(await post(FakeEngine(group=3), {**body, "stream": True}, path))
    for choice in plain["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert [i for c in parts for i in c.get("token_ids", [])] == choice["token_ids"] == list(b"Hello, w")
    # A chat has one prompt, so it belongs to the answer; for a completion, to each choice.
    expected, holders = (plain, events) if "chat" in path else (plain["choices"][0], [e["choices"][0] for e in events])
    shown = [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
    assert shown == [expected["prompt_token_ids"]] * n


@pytest.mark.parametrize("path", PATHS)
async def test_continuous_usage(path: str):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**PATHS[path], "stream": True, "n": 2, "max_tokens": 4}
    *chunks, last = events_of(await post(FakeEngine(group=2), {**body, "stream_options": options}, path))
    counts = {i: [c["usage"] for c in chunks if c["choices"][0]["index"] == i] for i in (0, 1)}
    for of_choice in counts.values():
        assert [u["completion_tokens"] for u in of_choice][-2:] == [2, 4]
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in of_choice)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert last["usage"]["prompt_tokens"] == counts[0][0]["prompt_tokens"]
    only = {"continuous_usage_stats": True}  # does nothing without include_usage, as with vLLM
    assert all("usage" not in e for e in events_of(await post(FakeEngine(), {**body, "stream_options": only}, path)))


async def test_cached_tokens_count_a_prompt_once():
    class Cached(FakeEngine):
        def _outputs(self, request: Request):
            for output in super()._outputs(request):
                choice = int(request.request_id.rpartition("-")[2])
                output.num_cached = self.cached[choice] if output.num_cached else 0
                yield output

    for cached, expected in [([0, 48, 48], 0), ([48, 48, 48], 48), ([0, 48, 48, 16, 48, 48], 16)]:
        engine = Cached()
        engine.cached = cached
        body = {"prompt": ["a" * 50] * (len(cached) // 3), "n": 3, "max_tokens": 2}
        usage = (await post(engine, body)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        assert events_of(await post(engine, body))[-1]["usage"] == usage


async def test_each_choice_is_reproducible():
    class Seeded(FakeEngine):
        def _outputs(self, request: Request):
            self.script = [*hashlib.sha256(b"%d" % request.seed).hexdigest()[:9].encode(), EOS]
            yield from super()._outputs(request)

    async def texts(**fields) -> list[str]:
        body = (await post(Seeded(group=99), {"prompt": "a", "max_tokens": 20, **fields})).json()
        return [choice["text"] for choice in body["choices"]]

    first = await texts(n=4, seed=7)
    assert first == await texts(n=4, seed=7)
    assert len(set(first)) == 4
    assert first[:1] == await texts(seed=7)
    assert first[:2] == await texts(n=2, seed=7)
    assert set(first).isdisjoint(await texts(n=4, seed=8))


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_id_of_the_clients_choice(path: str):
    engine = FakeEngine()
    body = (await post(engine, {**PATHS[path], "request_id": "mine-1"}, path)).json()
    assert body["id"] == ("chatcmpl" if "chat" in path else "cmpl") + "-mine-1"
    assert engine.requests[0].request_id == body["id"] + "-0"
    for bad in ("", "x" * 129):
        assert_error(await post(engine, {**PATHS[path], "request_id": bad}, path), 400, "request_id", "character")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"789"),
        ({"truncate_prompt_tokens": 99}, b"0123456789"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4}, b"6789"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0}, b"23456789"),
        # 16 tokens of output are the default, but at least one token of the prompt must stay
        ({"truncate_prompt_tokens": -1}, b"9"),
    ],
)
async def test_truncation_keeps_the_end(fields: dict, kept: bytes):
    engine = FakeEngine("x", max_model_len=99 if fields["truncate_prompt_tokens"] > 0 else 8)
    body = (await post(engine, {"prompt": "0123456789", "echo": True, **fields})).json()
    assert bytes(engine.requests[0].token_ids) == kept
    assert body["usage"]["prompt_tokens"] == len(kept)
    assert body["choices"][0]["text"].startswith(kept.decode())


async def test_a_chat_is_truncated_too():
    engine = FakeEngine(max_model_len=20)
    await post(engine, chat(truncate_prompt_tokens=-1, max_tokens=8), "/v1/chat/completions")
    assert bytes(engine.requests[0].token_ids) == b"r>hi<assistant>"[-12:]


async def test_harmless_values_and_nulls():
    nulls = dict.fromkeys(
        ["max_tokens", "temperature", "top_p", "n", "stop", "stream", "stream_options", "seed", "logit_bias", "user",
         "logprobs", "echo", "best_of", "suffix", "cache_salt", "prompt_logprobs", "truncate_prompt_tokens",
         "return_token_ids", "request_id", "stop_token_ids", "response_format", "guided_json", "use_beam_search"]
    )  # fmt: skip
    harmless = {"best_of": 2, "n": 2, "suffix": "", "length_penalty": 1.0, "use_beam_search": False, "stop": []}
    for fields in (nulls, harmless):
        response = await post(FakeEngine(), {"prompt": "a", **fields})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [{"guided_json": {}}, {"guided_choice": ["a"]}, {"use_beam_search": True}, {"length_penalty": 2}, {"suffix": "b"},
     {"banned_tokens": ["a"]}, {"typical_p": 0.5}, {"max_new_tokens": 5},
     {"best_of": 2},
     {"return_prompt_text": True}, {"truncation_side": "right"}],
)  # fmt: skip
async def test_fields_that_would_change_the_answer_are_refused(path: str, fields: dict):
    assert_error(await post(FakeEngine(), {**PATHS[path], **fields}, path), 400, *fields, "support")


async def test_fields_of_the_other_endpoint_are_refused():
    assert_error(await post(FakeEngine(), {"prompt": "a", "tools": [{}]}), 400, "tools", "/v1/chat/completions")
    assert_error(await post(FakeEngine(), chat(echo=True), "/v1/chat/completions"), 400, "echo", "true")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named_in_a_header(path: str, stream: bool):
    name = "x-callboard-ignored-fields"
    body = {**PATHS[path], "stream": stream}
    assert name not in (await post(FakeEngine(), body, path)).headers
    odd = {"made_up": 1, "no\r\nheader: x, y": {"deep": []}, "ä" * 200: 0, "metadata": {}}
    header = (await post(FakeEngine(), {**body, **odd}, path)).headers[name]
    first, second, third, fourth = header.split(", ")
    assert (first, second, fourth) == ("made_up", "no%0D%0Aheader%3A%20x%2C%20y", "metadata")
    assert len(third) == 64
    many = {f"field{i}": i for i in range(1000)}
    assert len((await post(FakeEngine(), {**body, **many}, path)).headers[name].split(", ")) == 32


@pytest.mark.parametrize(
    ("fields", "param", "cap"),
    [
        ({"n": 129}, "n", "128"),
        ({"stop": ["x"] * 65}, "stop", "64"),
        ({"stop": "x" * 1025}, "stop", "1024"),
        ({"prompt": ["a"] * 1025}, "prompt", "1024"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt", "1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
        ({"cache_salt": "x" * 1025}, "cache_salt", "1024"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
        ({"prompt": [[1], [999]]}, "prompt.1", "999"),
    ],
)
async def test_caps_are_named(fields: dict, param: str, cap: str):
    engine = FakeEngine()
    assert_error(await post(engine, {"prompt": "a", **fields}), 400, param, cap)
    assert engine.requests == []
