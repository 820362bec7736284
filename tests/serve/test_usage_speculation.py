"""The draft counts in an answer's usage: exact over steps, stop strings, choices, preemptions and lost engines."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import astuple
from openai.types.chat import ChatCompletionChunk

from actors.front.engine_group import EngineGroup
from runtime.base.types import RequestOutput
from runtime.core.executor import InProcess
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Speculation
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.serve.test_openai_client import OpenCompletion
from tests.support.engine.fake_runner import VOCAB, FixedShare, Oracle, sequential
from tests.support.engine.links import INFO, Engine, eventually, link_to, request
from tests.support.engine.whole import replace_extra
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer
from tests.support.models.runner_driver import tiny_runner

WRONG = 2  # guesses of each of the scripted engine's steps that are


def client_of(engine, draft: str | None = "ngram") -> openai.AsyncOpenAI:
    """The openai package with strict validation, over the HTTP front of `engine`."""
    app = build_http_app(Service(engine, byte_tokenizer(), MODEL, draft))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="-", http_client=http, max_retries=0, _strict_response_validation=True
    )


async def usages(client: openai.AsyncOpenAI, chat: bool, **fields) -> list[Any]:
    """The usage of a plain answer, and of each chunk of a stream that has one."""
    ask: Any = client.chat.completions.create if chat else client.completions.create
    fields |= {"model": MODEL, **({"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"})}
    options = {"include_usage": True, "continuous_usage_stats": True}
    plain = await ask(**fields)
    kind = ChatCompletionChunk if chat else OpenCompletion
    stream = await client.post(
        "/chat/completions" if chat else "/completions",
        body={**fields, **fields.pop("extra_body", {}), "stream": True, "stream_options": options},
        cast_to=kind,
        stream=True,
        stream_cls=openai.AsyncStream[kind],
    )
    return [plain.usage, *[chunk.usage async for chunk in stream]]


def predictions(usage) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("fields", "tokens", "accepted", "guessed"),
    [
        ({}, 11, 8, 8 + 3 * WRONG),  # of ten letters and EOS, four a step
        ({"n": 3}, 33, 24, 24 + 9 * WRONG),
        ({"max_tokens": 4}, 4, 3, 3 + WRONG),
        # It ends with the second guess of the second step. Right guesses beyond it do not count.
        ({"stop": "ef"}, 6, 3 + 2, 2 * (3 + WRONG)),
        ({"stop": "a"}, 1, 1, 3 + WRONG),
    ],
)
async def test_usage_counts_draft_tokens(chat: bool, fields: dict[str, Any], tokens: int, accepted: int, guessed: int):
    engine = FakeEngine("abcdefghij", group=4, num_wrong=WRONG)
    plain, *chunks, last = await usages(client_of(engine), chat, **{"max_tokens": 99, **fields})
    assert plain.completion_tokens == tokens
    assert predictions(plain) == (accepted, guessed - accepted)
    assert last == plain
    if not fields.get("n"):  # else of each choice alone
        assert predictions(chunks[0]) == ((0, 0) if chat else (min(3, accepted), 3 + WRONG - min(3, accepted)))
        assert predictions(chunks[-1]) == predictions(plain)


@pytest.mark.parametrize("chat", [True, False])
async def test_an_idle_draft_has_zeros_and_no_draft_no_details(chat: bool):
    assert all(u.completion_tokens_details is None for u in await usages(client_of(FakeEngine(), None), chat))
    assert all(predictions(u) == (0, 0) for u in await usages(client_of(FakeEngine()), chat))


async def test_a_reader_that_lags_gets_the_sum(served_link):
    """Several steps' tokens merged into one output keep each step's guesses separate."""
    engine, link, oracle = served_link
    outputs = link.generate(request(0, max_tokens=60))
    first = await anext(outputs)
    await eventually(lambda: not engine.loop.core.has_work)
    await asyncio.sleep(0.05)
    rest = [output async for output in outputs]
    assert len(rest) == 1
    check(oracle, [(request(0, max_tokens=60), [first, *rest])])


class Noting(Oracle):
    """An Oracle that records its guesses and their positions."""

    def __init__(self, share_right: float) -> None:
        super().__init__(share_right)
        self.rows: list[tuple[list[int], list[int]]] = []  # known tokens, guesses

    def guess(self, state, most: int) -> list[int]:
        guesses = super().guess(state, most)
        self.rows.append((state.tokens.tolist(), guesses))
        return guesses


def speculate(engine: Engine, oracle: Noting) -> None:
    replace_extra(engine.loop.core, Speculation(oracle, 5, (), 0.0))


@pytest.fixture
async def served_link():
    engine, oracle = Engine(draft="ngram"), Noting(0.7)
    speculate(engine, oracle)
    link = link_to(engine)
    await link.start()
    yield engine, link, oracle
    link.close()
    engine.loop.close()


def flagged(outputs: list[RequestOutput]) -> tuple[set[int], int]:
    """Places in a request's output that were guessed, and the number of all guesses."""
    places: set[int] = set()
    num_tokens = num_guessed = 0
    for output in outputs:
        for at, guessed, accepted in map(astuple, output.reports):
            new = set(range(num_tokens + at, num_tokens + at + accepted))
            assert 0 <= accepted <= guessed
            assert at + accepted <= len(output.token_ids)
            assert not places & new
            places |= new
            num_guessed += guessed
        num_tokens += len(output.token_ids)
    return places, num_guessed


def check(oracle: Noting, answers: list[tuple[Any, list[RequestOutput]]]) -> None:
    """The guesses that the outputs report are the guesses of the oracle that the sequence has."""
    for asked, outputs in answers:
        whole = asked.token_ids + sequential(asked, INFO.max_model_len)[0]
        assert asked.token_ids + [t for output in outputs for t in output.token_ids] == whole
        want, num_guessed = set(), 0
        for known, guesses in oracle.rows:
            if known == whole[: len(known)]:
                right = [g == t for g, t in zip(guesses, whole[len(known) :], strict=False)]
                num_right = [*right, False].index(False)
                want |= set(range(len(known) - asked.prompt_len, len(known) - asked.prompt_len + num_right))
                num_guessed += len(guesses)
        assert flagged(outputs) == (want, num_guessed)
        assert want


async def outputs_of(link: EngineGroup, asked) -> list[RequestOutput]:
    return [output async for output in link.generate(asked)]


async def test_outputs_mark_exactly_the_accepted_draft_tokens(served_link):
    _, link, oracle = served_link
    rng = random.Random(0)
    asked = [request(0, max_tokens=rng.randint(1, 60)), request(1, ignore_eos=False), request(5, max_tokens=40)]
    # All differ, so tokens identify their row.
    asked = [replace(one, token_ids=[rng.randrange(1, VOCAB) for _ in range(6)], prompt_len=6) for one in asked]
    check(oracle, list(zip(asked, await asyncio.gather(*(outputs_of(link, a) for a in asked)), strict=True)))


async def test_a_preempted_request_keeps_its_counts():
    """Too few blocks for all: guesses in flight at a preemption were made, and were not right."""
    engine, oracle = Engine(draft="ngram", max_num_seqs=16), Noting(0.8)
    speculate(engine, oracle)
    scheduler = engine.loop.core.scheduler
    scheduler.pool.allocate(scheduler.pool.num_available - 20)
    scheduler.extras[Admission].lengths = FixedShare(0.1)  # so it admits more than fit
    link = link_to(engine)
    await link.start()
    asked = [request(i, max_tokens=60, ignore_eos=False) for i in range(12)]
    answers = await asyncio.gather(*(outputs_of(link, a) for a in asked))
    link.close()
    engine.loop.close()
    assert scheduler.stats.preemptions > 0
    counts = [flagged(outputs) for outputs in answers]
    assert sum(len(places) for places, _ in counts) == scheduler.stats.accepted_draft_tokens
    assert sum(num_guessed for _, num_guessed in counts) == scheduler.stats.draft_tokens


async def test_a_lost_engine_loses_no_more_than_its_last_steps(served_link):
    engine, link, oracle = served_link
    asked = [request(i, max_tokens=300) for i in range(4)]
    engine.runners[-1].delay_s = 0.01
    reading = [asyncio.create_task(outputs_of(link, a)) for a in asked]
    for _ in range(2):
        await asyncio.sleep(0.15)
        engine.die()
        engine.restart()
        speculate(engine, oracle)
        engine.runners[-1].delay_s = 0.002
    for one, outputs in zip(asked, await asyncio.gather(*reading), strict=True):
        places, num_guessed = flagged(outputs)
        assert [t for o in outputs for t in o.token_ids] == sequential(one, INFO.max_model_len)[0]
        assert 100 < len(places) < 300
        assert num_guessed >= len(places)


async def test_an_abandoned_request_counts_its_delivered_tokens(served_link):
    """A stop string ends a request in the front. The guesses of delivered tokens are known, and nothing else is
    counted."""
    engine, link, oracle = served_link
    engine.runners[-1].delay_s = 0.005
    client = client_of(link)
    asked = request(0, max_tokens=80)
    tokens, _ = sequential(asked, INFO.max_model_len)
    num_used = max(tokens.index(token) for token in tokens) + 1  # up to the first character of the last token
    fields: Any = {"prompt": asked.token_ids, "max_tokens": 80, "extra_body": {"ignore_eos": True}}
    answer = await client.completions.create(model=MODEL, stop=chr(tokens[num_used - 1]), **fields)
    await eventually(lambda: not engine.loop.core.has_work)
    assert answer.choices[0].text == "".join(map(chr, tokens[: num_used - 1]))
    seen = [(known, guesses) for known, guesses in oracle.rows if len(known) - asked.prompt_len < num_used]
    accepted = 0
    for known, guesses in seen:
        right = [g == t for g, t in zip(guesses, tokens[len(known) - asked.prompt_len : num_used], strict=False)]
        accepted += [*right, False].index(False)
    assert answer.usage.completion_tokens == num_used
    assert predictions(answer.usage)[0] == accepted
    assert predictions(answer.usage)[1] >= sum(len(guesses) for _, guesses in seen) - accepted  # it may come late


@pytest.mark.long
async def test_an_engine_with_ngrams_and_a_model():
    """The openai client over HTTP front, link, engine loop, n-gram drafter and a small random model on the CPU."""
    runner = tiny_runner(draft="ngram", num_draft_tokens=4, num_kv_blocks=200)
    engine = Engine(info=runner.info, start=lambda: InProcess(runner), draft="ngram", num_draft_tokens=4, block_size=16)
    loop, link = engine.loop, link_to(engine)
    await link.start()
    try:
        client = client_of(link)
        total = 0
        fields = {"max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
        for chat in (True, False):
            plain, *_, last = await usages(client, chat, **fields)
            assert plain.completion_tokens == 60
            assert last.completion_tokens == 60
            (accepted, rejected), (again, rejected_again) = predictions(plain), predictions(last)
            assert again > accepted  # the first answer is a past output by then
            assert rejected_again < rejected
            total += accepted + rejected + again + rejected_again
        scheduler = loop.core.scheduler
        assert total == scheduler.stats.draft_tokens > 0
        assert scheduler.stats.accepted_draft_tokens > 0
    finally:
        link.close()
        loop.close()
