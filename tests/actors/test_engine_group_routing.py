"""Streams go to the engine that holds most of their prefix, over real sockets."""

import asyncio
import threading
from dataclasses import replace

import httpx
import pytest

from runtime.base.model.pooling import Pooling
from runtime.base.types import CallboardError, Request, SamplingParams
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.engine.fake_runner import sequential
from tests.support.engine.groups import Group, healthy, info_with, link_closing, live, running
from tests.support.engine.links import Engine, eventually, link_to, only_link, read
from tests.support.http.fake_engine import MODEL, byte_tokenizer


def asking(prompt, name="r", salt="", **params):
    params = {"max_tokens": 8, "ignore_eos": True, **params}
    return Request(name, prompt, len(prompt), SamplingParams(**params), cache_salt=salt)


def conversation(i, length=33):
    return [1 + (i * 5 + k * k) % 28 for k in range(length)]


async def first_output(group, request):
    async for output in group.generate(request):
        return output


def keys_of(engine):
    keys = engine.loop.core.scheduler.kv_cache.cache.keys()
    return {int.from_bytes(key, "little", signed=True) for key in keys}


def is_pictured(group, engine):
    (name,) = [link.name for link in group.links.values() if link.engine == str(group._directory.all.index(engine))]
    return group._router.held(name) == keys_of(engine)


async def test_second_turns_go_to_the_engine_of_the_first():
    engines = [Engine() for _ in range(3)]
    async with Group(*engines) as group:
        await eventually(lambda: all(is_pictured(group, e) for e in engines))
        where = {}
        for i in range(6):
            chosen = []
            async for output in group.generate(asking(conversation(i)), chosen.append):
                if output.num_expected is not None:
                    assert (output.num_expected, output.num_cached) == (0, 0)
            where[i] = chosen
        assert len({name for (name,) in where.values()}) > 1
        await eventually(lambda: all(is_pictured(group, e) for e in engines))
        for i in range(6):
            answer = sequential(asking(conversation(i)), 512)[0]
            second, chosen = asking([*conversation(i), *answer, 5, 6, 7]), []
            outputs = [output async for output in group.generate(second, chosen.append)]
            assert chosen == where[i]
            assert outputs[0].num_expected == outputs[0].num_cached == 40
        other = await first_output(group, asking(conversation(0), salt="another tenant"))
        assert (other.num_expected, other.num_cached) == (0, 0)
        scored = await first_output(group, asking(conversation(0), prompt_logprobs=0))
        assert (scored.num_expected, scored.num_cached) == (0, 0)


async def test_requests_of_a_session_go_to_one_engine():
    engines = [Engine() for _ in range(3)]
    async with Group(*engines) as group:
        homes = set()
        for session in "abcdef":
            chosen = []
            for i in range(4):  # one after another: a busy engine would be left
                asked = replace(asking(conversation(i)), session=session, cache_salt=f"{session}{i}")
                async for _ in group.generate(asked, chosen.append):
                    pass
                await eventually(lambda: all(is_pictured(group, e) for e in engines))
                await eventually(lambda: not group._router._rows.any())
            homes.add(tuple(set(chosen)))
        assert {len(home) for home in homes} == {1}
        assert len(homes) > 1


@pytest.mark.parametrize(
    ("pooling", "num_shared"), [(Pooling("last", num_labels=1), 32), (Pooling("last", normalized=True), 0)]
)
async def test_documents_go_to_the_engine_of_their_query(pooling, num_shared):
    """To rerankers. Engines cache nothing of texts to embed, so no engine is expected to have their prefix."""
    engines = [Engine(info=info_with(pooling=pooling)) for _ in range(3)]
    async with Group(*engines) as group:
        await eventually(lambda: all(is_pictured(group, e) for e in engines))
        for i in range(4):
            where = set()
            for document in ([7, 8, 9], [10, 11], [12, 13, 14, 15]):
                chosen, prompt = [], [*conversation(i, 32), *document]
                asked = Request("r", prompt, len(prompt), SamplingParams(max_tokens=1, pooled=True))
                (output,) = [output async for output in group.generate(asked, chosen.append)]
                assert output.num_expected == output.num_cached == (num_shared if where else 0)
                where.update(chosen)
                await eventually(lambda: all(is_pictured(group, e) for e in engines) and not group._router._rows.any())
            assert len(where) == 1 or not num_shared
        chosen, prompts = [], [[*conversation(9, 32), 1 + i, 2] for i in range(12)]
        asked = [Request(f"r{i}", p, len(p), SamplingParams(max_tokens=1, pooled=True)) for i, p in enumerate(prompts)]

        async def ask(request):
            return [output async for output in group.generate(request, chosen.append)]

        await asyncio.gather(*map(ask, asked))
        assert (len(set(chosen)) == 1) == bool(num_shared), "those of one request go together"


async def test_moved_streams_go_to_the_longest_cached_prefix():
    engines = [Engine(delay_s=0.005), Engine(), Engine(), Engine()]
    prompt = conversation(0, 65)
    for engine, length in zip(engines[1:], (20, 64, 36), strict=True):
        async with link_closing(link_to(engine)) as group:
            await group.start()
            await read(group, asking(prompt[:length]))
            assert not only_link(group).is_followed  # there is nothing to choose
            assert engine.loop.core.scheduler.kv_cache.cache.pending_events is None
    async with Group(engines[0]) as group:
        asked = [asking(prompt, f"r{i}", max_tokens=300, seed=None) for i in range(2)]
        reading = [asyncio.create_task(read(group, request)) for request in asked]
        await eventually(lambda: running(engines[0]) == 2 and engines[0].loop.core.scheduler.stats.steps > 5)
        group._directory.all += engines[1:]
        await eventually(lambda: len(healthy(group)) == 4)
        await eventually(lambda: all(is_pictured(group, e) for e in engines[1:]))
        engines[0].die()
        await eventually(lambda: live(engines[2]) == 2)
        for task, request in zip(reading, asked, strict=True):
            assert (await task)[:2] == sequential(request, 512)
        assert engines[2].loop.core.scheduler.stats.prompt_tokens_cached >= 2 * 64
        await eventually(lambda: is_pictured(group, engines[2]))
        for engine in engines[1:]:
            engine.loop.close()


async def test_prefixes_are_reset_by_http():
    engines = [Engine(), Engine()]
    async with Group(*engines) as group:
        service = Service(group, byte_tokenizer(), MODEL)
        transport = httpx.ASGITransport(build_http_app(service, HttpSettings(api_key=("k",))))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.post("/reset_prefix_cache")).status_code == 401
            for i in range(6):
                await read(group, asking(conversation(i)))
            assert all(keys_of(e) for e in engines)
            answer = await http.post("/reset_prefix_cache", headers={"authorization": "Bearer k"})
            assert (answer.status_code, answer.text) == (200, "")
            assert not any(keys_of(e) for e in engines)
            assert [(await first_output(group, asking(conversation(i)))).num_cached for i in range(6)] == [0] * 6
            await eventually(lambda: all(is_pictured(group, e) for e in engines))
            without_keys = httpx.ASGITransport(
                build_http_app(service, HttpSettings(cors_origin=("https://a.example",)))
            )
            async with httpx.AsyncClient(transport=without_keys, base_url="http://test") as page:
                for origin, status in (("https://a.example", 200), ("https://b.example", 403)):
                    answer = await page.post("/reset_prefix_cache", headers={"origin": origin})
                    assert answer.status_code == status
            group.drain("The server is stopping.")
            assert (await http.post("/reset_prefix_cache", headers={"authorization": "Bearer k"})).status_code == 503


async def test_a_reset_of_prefixes_returns_when_it_is_done(monkeypatch):
    engines = [Engine(), Engine()]
    async with Group(*engines) as group:
        for i in range(4):
            await read(group, asking(conversation(i)))
        may_go_on = threading.Event()
        engines[0].loop._call(may_go_on.wait)
        forgetting = asyncio.create_task(group.reset_prefix_cache())
        await eventually(lambda: not keys_of(engines[1]))
        await asyncio.sleep(0.05)
        assert not forgetting.done()
        may_go_on.set()
        await forgetting
        assert not keys_of(engines[0])

        may_go_on.clear()
        monkeypatch.setattr("actors.front.link._ANSWER_S", 0.05)
        engines[0].loop._call(may_go_on.wait)
        with pytest.raises(CallboardError, match=r"Engine 0 has not confirmed within .* is empty; try again\.$"):
            await group.reset_prefix_cache()
        may_go_on.set()
        await group.reset_prefix_cache()  # its own answer, not the earlier one, which was late


async def test_an_unreachable_engine_resets_before_its_next_request():
    engines = [Engine(), Engine()]
    async with Group(*engines) as group:
        for i in range(4):
            await read(group, asking(conversation(i)))
        may_go_on = threading.Event()
        engines[0].loop._call(may_go_on.wait)  # it does not read its messages before its connection breaks
        forgetting = asyncio.create_task(group.reset_prefix_cache())
        await eventually(lambda: not keys_of(engines[1]))
        for link in healthy(group):
            link._connection.transport.abort()
        await forgetting
        await group.reset_prefix_cache()
        may_go_on.set()
        await eventually(lambda: len(healthy(group)) == 2)
        assert not any(keys_of(e) for e in engines)


async def test_the_feed_survives_lost_connections_and_runners():
    engines = [Engine(info=info_with(num_kv_blocks=30)), Engine()]
    async with Group(*engines) as group:
        for i in range(8):
            await read(group, asking(conversation(i)))
        await eventually(lambda: all(is_pictured(group, e) for e in engines))
        for link in healthy(group):
            link._connection.transport.abort()
        engines[0].runners[-1].dead = "The runner was killed."
        await asyncio.gather(*(read(group, asking(conversation(i))) for i in range(4)))
        await eventually(lambda: len(healthy(group)) == 2)
        await eventually(lambda: all(is_pictured(group, e) for e in engines))
        engines[0].die()
        await eventually(lambda: len(healthy(group)) == 1)
        await eventually(lambda: engines[1].loop.core.scheduler.kv_cache.cache.pending_events is None)
