"""Streams that another front takes up where their first front left them: no token is lost or computed twice."""

import asyncio
from array import array
from dataclasses import replace

import pytest

from runtime.base.images import Image, ImageSpan
from runtime.base.types import FinishReason
from runtime.core.request_state import RequestState
from runtime.policy.kept_outputs import LIFE_S, MAX_TOKENS, KeptOutputs
from tests.support.engine.fake_runner import sequential
from tests.support.engine.groups import Group
from tests.support.engine.links import Engine, eventually, hurry, link_to, read, request

LENGTH = 60


def of_client(i=0, resumes=False, **params):
    asked = request(i, max_tokens=LENGTH, **params)
    return replace(asked, request_id=f"owner/chatcmpl-{i}-0", seed=7, keeps_output=True, resumes=resumes)


async def begun(group, asked, num_tokens=30):
    """Return a stream, and its first tokens."""
    stream, tokens = group.generate(asked), []
    while len(tokens) < num_tokens:
        tokens += (await anext(stream)).token_ids
    return stream, tokens


def live(engine):
    return len(engine.loop.core.scheduler.requests)


def num_kept(engine):
    return len(engine.loop.requests._kept._outputs)


async def resumed(group, asked):
    """Read a stream to its end, and return the number of tokens in its first output."""
    stream, sizes, tokens = group.generate(asked), [], []
    async for output in stream:
        sizes.append(len(output.token_ids))
        tokens += output.token_ids
    assert (tokens, output.finish_reason) == sequential(asked, 512)
    return sizes[0]


@pytest.mark.parametrize("end", ["the client leaves", "the front dies"])
async def test_kept_tokens_are_not_computed_again(end):
    engine = Engine(delay_s=0.01)
    async with Group(engine) as second:
        first = link_to(engine)
        await first.start()
        stream, tokens = await begun(first, of_client())
        if end == "the client leaves":
            await stream.aclose()
        else:
            first.close()
        await eventually(lambda: live(engine) == 0)
        assert num_kept(engine) == 1
        assert await resumed(second, of_client(resumes=True)) >= len(tokens)
        assert num_kept(engine) == 0
        assert engine.loop.stats()["steps"] < LENGTH + 20  # at least 30 more if all were computed again
        first.close()


async def test_a_stream_that_still_runs_is_taken_over():
    engine = Engine(delay_s=0.01)
    async with Group(engine) as second:
        first = link_to(engine)
        await first.start()
        stream, tokens = await begun(first, of_client())
        assert await resumed(second, of_client(resumes=True)) >= len(tokens)
        *_, last = [output async for output in stream]
        assert last.finish_reason is FinishReason.ABORT
        assert "taken up" in last.error
        first.close()


@pytest.mark.parametrize("other", [{"temperature": 0.5}, {"logprobs": 1}])
async def test_another_request_of_the_same_id_gets_nothing(other):
    engine = Engine(delay_s=0.01)
    async with Group(engine) as group:
        stream, _ = await begun(group, of_client())
        await stream.aclose()
        await eventually(lambda: live(engine) == 0)
        await resumed(group, of_client(resumes=True, **other))
        assert num_kept(engine) == 1


async def test_an_unknown_output_is_computed_again():
    engine = Engine()
    async with Group(engine) as group:
        await resumed(group, of_client(resumes=True))


async def test_a_dead_engine_costs_no_token():
    """Its kept tokens are gone, and the next engine computes them again."""
    engine = Engine(delay_s=0.01)
    async with Group(engine) as group:
        stream, _ = await begun(group, of_client())
        await stream.aclose()
        engine.die()
        engine.restart()
        hurry(engine)
        await resumed(group, of_client(resumes=True))


async def test_requests_without_the_wish_are_not_kept():
    engine = Engine(delay_s=0.01)
    async with Group(engine) as group:
        stream, _ = await begun(group, replace(of_client(), keeps_output=False))
        await stream.aclose()
        await eventually(lambda: live(engine) == 0)
        assert num_kept(engine) == 0
        tokens, *_ = await asyncio.wait_for(read(group, of_client(1)), 60)
        assert len(tokens) == LENGTH


# ---- limits ----------------------------------------------------------------------------------------------------------


def state_of(asked, num_tokens):
    tokens = array("i", [*asked.token_ids, *range(num_tokens)])
    return RequestState(asked, tokens, 1 << 30, frozenset(), (0, 0, 0))


def test_limits_of_tokens_and_time():
    now = 0.0
    kept = KeptOutputs(lambda: now)
    asked = [of_client(i) for i in range(5)]
    for each in asked[:4]:
        kept.keep(each.request_id, state_of(each, MAX_TOKENS // 3), "f")
    assert [kept.take(each, "f") is not None for each in asked[:2]] == [False, False]
    assert kept.take(asked[2], "other weights") is None
    assert kept.take(asked[2], "f").token_ids.tolist() == list(range(MAX_TOKENS // 3))
    assert kept.take(asked[2], "f") is None
    now = LIFE_S + 1
    assert kept.take(asked[3], "f") is None
    kept.keep(asked[4].request_id, state_of(asked[4], MAX_TOKENS), "f")
    assert kept.take(asked[4], "f") is None
    assert kept._num_tokens == 0


def test_a_later_end_replaces_an_earlier_one():
    kept, asked = KeptOutputs(), of_client()
    for num_tokens in (3, 5):
        kept.keep(asked.request_id, state_of(asked, num_tokens), "f")
    assert len(kept.take(asked, "f").token_ids) == 5


def test_outputs_are_kept_by_images_without_their_pixels():
    first, second = (Image(bytes([i]) * 16, ((1, 1),), bytes(3)) for i in range(2))
    kept, asked = KeptOutputs(), replace(of_client(), images=(ImageSpan(1, 2, first),))
    kept.keep(asked.request_id, state_of(asked, 3), "f")
    assert not any(span.image.pixels for span in kept._outputs[asked.request_id].request.images)
    assert kept.take(replace(asked, images=(ImageSpan(1, 2, second),)), "f") is None
    assert kept.take(asked, "f") is not None
