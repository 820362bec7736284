"""However the engine's tokens arrive, a stream adds up to the plain answer, and both are the text of the tokens."""

import asyncio
import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from runtime.base.types import FinishReason, Request, RequestOutput, TokenLogprobs
from runtime.output.processor import Delta
from runtime.text.tokenizer import Tokenizer
from serve_app.apis.completions.endpoint import COMPLETIONS
from serve_app.apis.completions.request import CompletionRequest
from serve_app.service.service import Service
from tests.support.engine.fake_runner import prompt_scores
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer
from tests.text.test_text_stream import TOKENIZERS

EOS = 0
BYTES = byte_tokenizer()


class Scripted(FakeEngine):
    """Answers with `script`, cut into outputs before the indices in `cuts`."""

    def __init__(self, script: list[int], cuts: list[int]) -> None:
        super().__init__()
        self.script, self.cuts = script, cuts

    def _outputs(self, request: Request):
        params = request.params
        stops = {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
        ids = self.script[: params.max_tokens]
        end = next((at for at, i in enumerate(ids) if i in stops), None)
        reason = FinishReason.LENGTH if end is None else FinishReason.STOP
        ids = ids if end is None else ids[: end + 1]
        edges = [0, *[cut for cut in self.cuts if cut < len(ids)], len(ids)]
        for begin, stop in pairwise(edges):
            output = RequestOutput(request.request_id, ids[begin:stop])
            if begin == 0 and params.prompt_logprobs is not None:
                scores = [self.score(i, params.prompt_logprobs) for i in request.token_ids[1:]]
                output.reports = [prompt_scores([(s.logprob, s.rank, s.top) for s in scores], params.prompt_logprobs)]
            if params.logprobs is not None:
                output.logprobs = [self.score(i, params.logprobs) for i in output.token_ids]
            if stop == len(ids):
                output.finish_reason = reason
                output.stop_token_id = ids[-1] if ids and ids[-1] in params.stop_token_ids else None
            yield output

    @staticmethod
    def score(token_id: int, num_top: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -token_id / 8, 2, tuple((token_id + k, -k / 4) for k in range(num_top)))


async def plain(tokenizer: Tokenizer, request: CompletionRequest, engine: Scripted) -> dict:
    service = Service(engine, tokenizer, MODEL)
    job = service.prepare(COMPLETIONS, request)
    choices = [Delta(i) for i in range(len(job.requests))]
    async for deltas in service.run(job):
        for delta in deltas:
            choices[delta.index].add(delta)
    return json.loads(COMPLETIONS.answer(job, choices))


async def streamed(tokenizer: Tokenizer, request: CompletionRequest, engine: Scripted) -> bytes:
    service = Service(engine, tokenizer, MODEL)
    job = service.prepare(COMPLETIONS, request)
    stream = COMPLETIONS.stream(job, include_usage=True)
    return stream.first() + b"".join([stream.events(d) async for d in service.run(job)]) + stream.last()


def events(stream: bytes) -> list[dict]:
    *parts, end, rest = stream.decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def joined(chunks: list[dict], index: int) -> dict:
    """The choice that the chunks of a stream add up to."""
    whole: dict = {"index": index, "text": "", "logprobs": None, "token_ids": []}
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] != index:
                continue
            assert "finish_reason" not in whole, "nothing comes after the finish reason"
            whole["text"] += part.pop("text")
            whole["token_ids"] += part.pop("token_ids")
            if (logprobs := part.pop("logprobs")) is not None:
                whole["logprobs"] = {k: (whole["logprobs"] or {}).get(k, []) + v for k, v in logprobs.items()}
            if part["finish_reason"] is None:
                part = {k: v for k, v in part.items() if k == "prompt_token_ids"}
            whole |= part
    return whole


_BYTE_TEXTS = st.text("ab é日😀", min_size=1, max_size=12).map(lambda text: list(text.encode()))


@st.composite
def cases(draw):
    tokenizer = draw(st.just(BYTES) | st.sampled_from([*TOKENIZERS.values()]))
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20)
    texts = draw(st.just(_BYTE_TEXTS) | st.just(any_ids)) if tokenizer is BYTES else any_ids
    ids = draw(texts) + draw(st.sampled_from([[], [EOS], [tokenizer.vocab_size + 1]]))
    prompts = draw(st.lists(texts, min_size=1, max_size=2))
    whole = tokenizer.decode(ids)
    spans = st.tuples(st.integers(0, len(whole)), st.integers(1, 4)).map(lambda s: whole[s[0] : s[0] + s[1]])
    stops = draw(st.just([]) | st.lists(spans.filter(len) if whole else st.just("a"), max_size=2))
    request = CompletionRequest(
        prompt=prompts,
        n=draw(st.sampled_from([1, 1, 2])),
        seed=draw(st.integers(0, 9)),
        max_tokens=draw(st.just(len(ids)) | st.integers(0, len(ids) + 1)),
        stop=stops,
        stop_token_ids=draw(st.just([]) | st.sampled_from([[i] for i in ids if i < tokenizer.vocab_size])),
        ignore_eos=draw(st.booleans()),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        echo=draw(st.booleans()),
        return_token_ids=True,
    )
    cuts = st.lists(st.integers(1, len(ids)), max_size=len(ids), unique=True).map(sorted)
    return tokenizer, request, ids, draw(cuts), draw(cuts)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_stream_adds_up_to_the_plain_answer(case):
    tokenizer, request, ids, some_cuts, other_cuts = case

    async def both() -> tuple[dict, bytes]:
        return (
            await plain(tokenizer, request, Scripted(ids, some_cuts)),
            await streamed(tokenizer, request, Scripted(ids, other_cuts)),
        )

    answer, stream = asyncio.run(both())
    *chunks, last = events(stream)
    assert last["choices"] == []
    assert last["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
    for choice in answer["choices"]:
        assert joined(chunks, choice["index"]) == choice
        check_choice(tokenizer, request, choice)


def check_choice(tokenizer: Tokenizer, request: CompletionRequest, choice: dict) -> None:
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    by_string = isinstance(choice["stop_reason"], str)
    assert not by_string or choice["finish_reason"] == "stop"
    assert not (by_string and request.include_stop_str_in_output) or choice["text"].endswith(choice["stop_reason"])
    hidden = choice["finish_reason"] == "stop" and not by_string and not request.include_stop_str_in_output
    shown = output[:-1] if hidden else output
    whole = tokenizer.decode(prompt + shown, request.skip_special_tokens)
    if request.echo and not by_string:
        assert choice["text"] == whole
    if (logprobs := choice["logprobs"]) is None:
        return
    listed = prompt + output if request.echo else output
    offsets = logprobs["text_offset"]
    assert len(listed) == len(offsets) == len(logprobs["tokens"]) == len(logprobs["top_logprobs"])
    assert logprobs["token_logprobs"][int(request.echo) :] == [-i / 8 for i in listed][int(request.echo) :]
    assert offsets == sorted(offsets)
    if request.echo and tokenizer is BYTES and "\ufffd" not in whole:
        # A token begins where the whole characters of the bytes before it end.
        special = dict.fromkeys(tokenizer.special_ids, b"")
        if not request.skip_special_tokens:
            special = {i: tokenizer.decode([i], False).encode() for i in special}
        pieces = [special[i] if i in special else tokenizer.token_bytes(i) for i in listed]
        before = [b"".join(pieces[:at]).decode("utf-8", "ignore") for at in range(len(listed))]
        assert offsets == [len(text) for text in before]


def test_a_stream_cut_at_any_byte_is_the_same_to_a_client():
    """A recorded stream is parsed by the openai package, cut in two at every offset, and byte by byte. It has
    characters of two to four bytes, log-probabilities and two choices."""
    script = [*"é日😀 a".encode(), EOS]
    request = CompletionRequest(prompt=[[97]], n=2, logprobs=1, max_tokens=9, return_token_ids=True)
    stream = asyncio.run(streamed(BYTES, request, Scripted(script, [2, 5])))
    expected = [sse.data for sse in SSEDecoder().iter_bytes(iter([stream]))]
    assert expected[-1] == "[DONE]"
    assert expected.count("[DONE]") == 1
    assert [json.loads(data) for data in expected[:-1]] == events(stream)
    for at in range(1, len(stream)):
        parsed = [sse.data for sse in SSEDecoder().iter_bytes(iter([stream[:at], stream[at:]]))]
        assert parsed == expected, at
    assert [sse.data for sse in SSEDecoder().iter_bytes(bytes([b]) for b in stream)] == expected
