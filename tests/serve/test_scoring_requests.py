"""Requests that score their prompt: echo with logprobs, prompt_logprobs and max_tokens 0, against a scripted engine."""

from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from runtime.base.types import CallboardError, SamplingParams
from runtime.text.tokenizer import Tokenizer
from tests.support.engine.fake_runner import prompt_scores
from tests.support.http.fake_engine import EOS, FakeEngine, byte_tokenizer, chat, client_of, events_of, post


def prompt_logprob(char: str) -> float:
    return -ord(char) / 128


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_of_lm_eval(prompt, stream: bool):
    engine = FakeEngine("xyz")
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "stream": stream}
    response = await post(engine, {"prompt": prompt, **fields})
    if stream:
        (event,) = events_of(response)
        choice = event["choices"][0]
    else:
        choice = response.json()["choices"][0]
        assert response.json()["usage"]["completion_tokens"] == 1
    assert choice["text"] == "abcx"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "x"],
        "token_logprobs": [None, prompt_logprob("b"), prompt_logprob("c"), -0.5],
        "top_logprobs": [
            None,
            {"A": -1.5, "b": prompt_logprob("b")},
            {"A": -1.5, "c": prompt_logprob("c")},
            {"A": -1.5, "x": -0.5},
        ],
        "text_offset": [0, 1, 2, 3],
    }
    assert engine.requests[0].params.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", "ab"])
async def test_max_tokens_0_scores_and_generates_nothing(stream: bool, prompt: str):
    body = {"prompt": prompt, "max_tokens": 0, "logprobs": 0, "echo": True, "n": 2, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = await post(FakeEngine(), body)
    events = events_of(response) if stream else [response.json()]
    choices = [choice for event in events for choice in event["choices"]]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [(i, prompt, "length") for i in (0, 1)]
    scores = [None, *map(prompt_logprob, prompt[1:])]
    assert [c["logprobs"]["token_logprobs"] for c in choices] == [scores] * 2
    assert events[-1]["usage"]["completion_tokens"] == 0
    assert events[-1]["usage"]["total_tokens"] == len(prompt)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_max_tokens_0_without_scores(echo: bool, logprobs: int | None):
    """OpenAI allows it. The prompt is computed, which fills the prefix cache, and the answer is empty."""
    engine = FakeEngine()
    fields = {"max_tokens": 0, "echo": echo, "seed": 1} | ({} if logprobs is None else {"logprobs": logprobs})
    body = (await post(engine, {"prompt": "ab", **fields})).json()
    assert body["choices"][0]["text"] == ("ab" if echo else "")
    assert (body["choices"][0]["logprobs"] is not None) == (echo and logprobs is not None)
    assert body["usage"]["completion_tokens"] == 0
    assert engine.requests[0].params.max_tokens == 0
    (event,) = events_of(await post(FakeEngine(), {"prompt": "ab", "stream": True, **fields}))
    assert event["choices"] == body["choices"]


async def test_the_engine_allows_max_tokens_0_only_to_score():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(CallboardError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    with pytest.raises(CallboardError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=21)


async def test_a_prompt_may_fill_the_context_if_nothing_is_generated():
    body = {"prompt": "a" * 128, "max_tokens": 0, "echo": True, "logprobs": 0}
    assert (await post(FakeEngine(), body)).json()["usage"]["prompt_tokens"] == 128
    response = await post(FakeEngine(), body | {"prompt": "a" * 129})
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_echoed_offsets_refer_to_the_given_text():
    for prompt in ("hé<eos>日", [*"hé".encode(), EOS, *"日".encode()]):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 4, "skip_special_tokens": True}
        choice = (await post(FakeEngine("é!x"), body)).json()["choices"][0]
        eos = "<eos>" if isinstance(prompt, str) else ""  # spelled out by the client, or hidden as in any decoding
        assert choice["text"] == f"hé{eos}日é!x"
        at = 2 + len(eos)
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, at, at, at, at + 1, at + 1, at + 2, at + 3]


@pytest.mark.parametrize("add", [True, False])
async def test_special_tokens_around_a_text_have_no_offsets(add: bool):
    tokenizer = byte_tokenizer()
    around = tokenizers.processors.TemplateProcessing("<eos> $A <eos>", special_tokens=[("<eos>", EOS)])
    tokenizer._backend.post_processor = around
    engine = FakeEngine("x")
    body = {"prompt": "hé", "echo": True, "logprobs": 0, "max_tokens": 1} | (
        {} if add else {"add_special_tokens": False}
    )
    async with client_of(engine, tokenizer) as client:
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        await client.post("/v1/chat/completions", json=chat(add_special_tokens=add))
    assert choice["text"] == "héx"
    assert choice["logprobs"]["text_offset"] == ([0, 0, 1, 1, 2, 2] if add else [0, 1, 1, 2])
    assert [request.token_ids.count(EOS) for request in engine.requests] == [2 * add] * 2


def test_offsets_of_tokens_with_a_dropped_space():
    """As GPT-2's tokenizer.json does (trim_offsets)."""
    vocab = {c: i for i, c in enumerate("abĠé")} | {"Ġa": 4, "ĠĠ": 5, "Ã": 6, "©": 7}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("Ġ", "a"), ("Ġ", "Ġ")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=(), special_tokens={}, chat_template=None)
    text = "b a   éa"
    assert [backend.id_to_token(i) for i in tokenizer.encode(text)] == ["b", "Ġa", "ĠĠ", "Ġ", "Ã", "©", "a"]
    assert tokenizer.offsets(text) == [0, 1, 3, 5, 6, 6, 7]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8") | st.sampled_from(" aé日😀\n"), max_size=30))
def test_offsets_count_the_whole_characters_before_a_token(smollm2_path, text: str):
    tokenizer = _loaded(smollm2_path)
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
    assume(b"".join(pieces).decode("utf-8", "replace") == text)  # its vocabulary lacks some bytes of rare characters
    before = [b"".join(pieces[:at]).decode("utf-8", "ignore") for at in range(len(pieces))]
    assert tokenizer.offsets(text) == [len(part) for part in before]


@cache
def _loaded(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


async def test_a_character_unfinished_in_the_prompt_is_output():
    body = {"prompt": [97, 0xE6, 0x97], "echo": True, "logprobs": 0, "max_tokens": 2}
    engine = FakeEngine()
    engine.script = [0xA5, 98, EOS]
    choice = (await post(engine, body)).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("a日b", [0, 1, 1, 1, 2])
    choice = (await post(engine, body | {"max_tokens": 0})).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("a\ufffd", [0, 1, 1])


async def test_an_echo_of_a_busy_engine_fails_before_it_streams():
    response = await post(FakeEngine(busy=True), {"prompt": "a", "echo": True, "stream": True})
    assert response.status_code == 429


async def test_prompt_logprobs():
    engine = FakeEngine("x")
    fields = {
        "prompt": [[97, 98], [97, 0xC3]],
        "prompt_logprobs": 1,
        "echo": True,
        "logprobs": 3,
        "return_token_ids": True,
    }
    choices = (await post(engine, fields)).json()["choices"]
    top = {"65": {"logprob": -1.5, "rank": 1, "decoded_token": "A"}}
    own = [("98", -98 / 128, "b"), ("195", -195 / 128, "\ufffd")]
    for choice, (token_id, logprob, text) in zip(choices, own, strict=True):
        entry = {token_id: {"logprob": logprob, "rank": 3, "decoded_token": text}}
        assert choice["prompt_logprobs"] == [None, top | entry]
        assert len(choice["logprobs"]["top_logprobs"][1]) == 4
        assert choice["token_ids"] == [120, EOS]
    assert [c["prompt_token_ids"] for c in choices] == [[97, 98], [97, 0xC3]]
    assert engine.requests[0].params.prompt_logprobs == 3


async def test_prompt_logprobs_of_a_chat():
    body = chat(prompt_logprobs=0, return_token_ids=True, max_tokens=2)
    answer = (await post(FakeEngine(), body, "/v1/chat/completions")).json()
    text = "<user>hi<assistant>"
    assert answer["prompt_token_ids"] == list(text.encode())
    assert answer["prompt_logprobs"][0] is None
    assert [next(iter(p.values()))["decoded_token"] for p in answer["prompt_logprobs"][1:]] == list(text[1:])
    assert answer["choices"][0]["token_ids"] == list(b"He")


async def test_prompt_logprobs_are_not_streamed():
    response = await post(FakeEngine(), {"prompt": "a", "prompt_logprobs": 1, "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"


async def test_the_likeliest_of_tokens_with_one_text_counts():
    """An eval harness takes a token as greedy if no alternative is above it."""
    tokenizer = byte_tokenizer()
    tokenizer.pieces[66] = b"a"

    class Twins(FakeEngine):
        def _outputs(self, request):
            for output in super()._outputs(request):
                output.reports = [prompt_scores([(-0.75, 3, [(66, -0.125), (97, -0.75)])], 2)]
                yield output

    async with client_of(Twins("x"), tokenizer) as client:
        body = {"prompt": "aa", "echo": True, "logprobs": 2, "max_tokens": 0}
        logprobs = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][1] == {"a": -0.125}
    assert logprobs["token_logprobs"][1] == -0.75
