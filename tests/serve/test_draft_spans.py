"""`return_draft_spans`: the characters of a completion that a draft had guessed, in cut, echoed and delayed outputs."""

import asyncio
import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.reports import Verified
from runtime.output.processor import Delta
from serve_app.apis.completions.endpoint import COMPLETIONS
from serve_app.apis.completions.request import CompletionRequest
from serve_app.service.service import Service
from tests.serve.test_stream_equals_plain import Scripted, events
from tests.support.http.fake_engine import EOS, MODEL, FakeEngine, byte_tokenizer, events_of, post

BYTES = byte_tokenizer()


class Guessed(Scripted):
    """Its outputs report the steps that they are made of: the number of guessed tokens of each."""

    def __init__(self, ids: list[int], cuts: list[int], steps: list[int], right: list[int]) -> None:
        super().__init__(ids, cuts)
        self.rows = [(a, b, min(r, b - a)) for (a, b), r in zip(pairwise([0, *steps, len(ids)]), right, strict=True)]

    async def generate(self, request, on_engine=None):
        begin = 0
        async for output in super().generate(request):
            end = begin + len(output.token_ids)
            for start, stop, right in self.rows:  # a row's end may be cut by max_tokens, its start is in one output
                if start >= begin and start < end:
                    verified = Verified(start - begin, 5, min(right, stop - start, end - start))
                    output.reports = [*output.reports, verified]
            begin = end
            yield output


@st.composite
def cases(draw):
    text = draw(st.text("abé日😀", min_size=1, max_size=12))
    ids = [*text.encode(), EOS]
    steps = draw(st.lists(st.integers(1, len(ids) - 1), max_size=len(ids), unique=True).map(sorted))
    right = draw(st.lists(st.integers(0, 4), min_size=len(steps) + 1, max_size=len(steps) + 1))
    cuts = draw(st.lists(st.sampled_from(steps), unique=True).map(sorted)) if steps else []  # outputs are whole steps
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 4)).map(lambda s: text[s[0] : s[0] + s[1]])
    request = CompletionRequest(
        prompt=draw(st.sampled_from(["p", "日本"])),
        max_tokens=100,
        stop=draw(st.lists(spans.filter(len), max_size=2)),
        include_stop_str_in_output=draw(st.booleans()),
        echo=draw(st.booleans()),
        logprobs=None,
        return_draft_spans=True,
    )
    return text, request, Guessed(ids, cuts, steps, right)


def covered(spans: list[list[int]]) -> set[int]:
    places = [place for start, end in spans for place in range(start, end)]
    assert len(places) == len(set(places))
    assert all(start < end for start, end in spans)
    return set(places)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_spans_cover_the_characters_of_draft_tokens(case):
    text, request, engine = case
    service = Service(engine, BYTES, MODEL, "ngram")
    prepared = service.prepare(COMPLETIONS, request)

    async def run() -> list[list[Delta]]:
        return [deltas async for deltas in service.run(prepared)]

    stream = COMPLETIONS.stream(prepared, include_usage=True)
    parts = stream.first() + b"".join(stream.events(deltas) for deltas in asyncio.run(run())) + stream.last()
    *chunks, last = events(parts)
    whole = Delta(0)
    for deltas in asyncio.run(run()):
        for delta in deltas:
            whole.add(delta)
    plain = json.loads(COMPLETIONS.answer(prepared, [whole]))
    choice = plain["choices"][0]

    guessed = {i for start, _, right in engine.rows for i in range(start, start + right)}
    begins = len(request.prompt) if request.echo else 0
    ends = [len(text[: i + 1].encode()) - 1 for i in range(len(text))]  # the last token of each character
    want = {begins + i for i, end in enumerate(ends) if end in guessed and begins + i < len(choice["text"])}
    assert covered(choice["draft_spans"]) == want

    shown = 0
    for chunk in chunks:
        part = chunk["choices"][0]
        places = covered(part["draft_spans"])
        assert all(shown <= place < shown + len(part["text"]) for place in places)
        want -= places
        shown += len(part["text"])
    assert not want
    assert last["usage"] == plain["usage"]


async def test_spans_are_sent_only_if_requested_outside_chats():
    body = {"prompt": "p", "max_tokens": 5}
    plain = (await post(FakeEngine(), body)).json()
    assert "draft_spans" not in plain["choices"][0]
    for chunk in events_of(await post(FakeEngine(), {**body, "stream": True})):
        assert "draft_spans" not in chunk["choices"][0]
    asked = (await post(FakeEngine(), {**body, "return_draft_spans": True})).json()
    assert asked["choices"][0]["draft_spans"] == []  # no draft guesses there
    chat = {"messages": [{"role": "user", "content": "hi"}], "return_draft_spans": True}
    answer = await post(FakeEngine(), chat, "/v1/chat/completions")
    assert answer.headers["x-callboard-ignored-fields"] == "return_draft_spans"
