"""Engines that sleep release their memory. Their requests wait, and streams notice only a pause."""

import asyncio
import threading

import httpx
import pytest

from actors.wire.engine_client import EngineRefusal, Refusal
from runtime.base.types import CallboardError
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.actors.test_engine_group_routing import keys_of
from tests.support.engine.fake_runner import sequential
from tests.support.engine.groups import Group, check, healthy, info_with, link_closing, live
from tests.support.engine.links import Engine, eventually, link_to, read, request
from tests.support.http.fake_engine import MODEL, byte_tokenizer


def client_of(service, settings=None):
    transport = httpx.ASGITransport(build_http_app(service, settings))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def fail(text):
    raise CallboardError(text)


def level(engine):
    return engine.loop.stats()["sleep_level"]


@pytest.mark.parametrize("deep", [1, 2])
async def test_streams_wait_while_their_engines_sleep(deep):
    engines = [Engine(delay_s=0.002), Engine(delay_s=0.002)]
    async with Group(*engines) as group, link_closing(link_to(*engines)) as other_front:
        await other_front.start()
        reading = asyncio.gather(*(read(group, request(i, max_tokens=100)) for i in range(8)))
        await eventually(lambda: all(e.loop.core.scheduler.stats.steps > 5 for e in engines))
        await group.sleep(deep)
        steps = [e.loop.core.scheduler.stats.steps for e in engines]
        assert [level(e) for e in engines] == [deep, deep]
        assert not any(keys_of(e) for e in engines)
        await eventually(lambda: group.is_asleep and other_front.is_asleep)
        assert group.health() is None
        late = asyncio.create_task(read(other_front, request(1)))
        await eventually(lambda: sum(map(live, engines)) == 9)
        await asyncio.sleep(0.05)
        assert [e.loop.core.scheduler.stats.steps for e in engines] == steps
        assert not any(e.loop.core.has_work and not e.loop.check_progress() for e in engines)
        await other_front.sleep(0)
        await check(reading, 8, 100)
        assert (await late)[:2] == sequential(request(1), 512)
        await eventually(lambda: not group.is_asleep and not other_front.is_asleep)
        assert [len(e.runners) for e in engines] == [deep, deep]


async def test_a_sleeping_engine_can_only_sleep_deeper():
    async with Group(engine := Engine()) as group:
        for asked, now in ((0, 0), (1, 1), (1, 1), (2, 2), (1, 2), (0, 0), (0, 0)):
            await group.sleep(asked)
            assert level(engine) == now
        assert (await read(group, request(0)))[:2] == sequential(request(0), 512)


async def test_the_queue_timeout_holds_for_a_sleeping_engine():
    async with Group(engine := Engine(queue_timeout_s=0.1)) as group:
        await group.sleep(1)
        with pytest.raises(EngineRefusal, match="queue_timeout_s") as late:
            await asyncio.wait_for(read(group, request(0)), 5)
        assert late.value.reason is Refusal.LATE
        assert not live(engine)


async def test_runners_lost_in_sleep_are_replaced_at_wake_up():
    async with Group(engine := Engine()) as group:
        await group.sleep(1)
        engine.runners[-1].dead = "Rank 0 is gone."
        reading = asyncio.create_task(read(group, request(0)))
        await group.sleep(0)
        assert (await reading)[:2] == sequential(request(0), 512)
        engine.runners[-1].dead = "Rank 0 is gone."
        with pytest.raises(CallboardError, match=r"^Engine 0 does not sleep: Rank 0 is gone\.$"):
            await group.sleep(1)
        assert not level(engine)
        assert len(engine.runners) == 3


async def test_engines_sleep_on_while_their_memory_is_taken():
    async with Group(engine := Engine()) as group:
        await group.sleep(1)
        reading, set_level, asked = asyncio.create_task(read(group, request(0))), engine.set_sleep, []
        engine.loop._sleep._set_level = lambda level: asked.append(level) or (level or fail("There is no room."))
        with pytest.raises(CallboardError, match=r"^Engine 0 does not wake up: There is no room\.$"):
            await group.sleep(0)
        assert (asked, level(engine), len(engine.runners)) == ([0, 1], 1, 1)
        engine.loop._sleep._set_level = set_level
        await group.sleep(0)
        assert (await reading)[:2] == sequential(request(0), 512)


async def test_deep_sleep_lasts_until_the_model_can_be_loaded():
    async with Group(engine := Engine()) as group:
        await group.sleep(2)
        reading, start = asyncio.create_task(read(group, request(0))), engine.start
        engine.start = lambda: fail("Too little memory.")
        for _ in range(2):
            with pytest.raises(CallboardError, match=r"^Engine 0 does not wake up: Too little memory\.$"):
                await asyncio.wait_for(group.sleep(0), 60)
            assert level(engine) == 2
            await eventually(lambda: group.is_asleep and group.health() is None)
        engine.start = start
        await group.sleep(0)
        assert (await asyncio.wait_for(reading, 60))[:2] == sequential(request(0), 512)


async def test_requests_go_to_engines_that_are_awake():
    engines = [Engine(), Engine()]
    async with Group(*engines) as group:
        sleepers = [link for link in group.links.values() if link.engine == "0"]
        await sleepers[0].sleep(1)
        await eventually(lambda: sleepers[0].is_asleep)
        got = await asyncio.wait_for(asyncio.gather(*(read(group, request(i)) for i in range(6))), 5)
        assert [tokens for tokens, *_ in got] == [sequential(request(i), 512)[0] for i in range(6)]


async def test_an_engine_lost_during_sleep_is_named():
    async with Group(engine := Engine()) as group:
        may_go_on = threading.Event()
        engine.loop._call(may_go_on.wait)
        asked = asyncio.create_task(group.sleep(1))
        await asyncio.sleep(0)
        healthy(group)[0]._connection.transport.abort()
        with pytest.raises(CallboardError, match=r"^Engine 0 does not sleep: it was lost meanwhile\.$"):
            await asyncio.wait_for(asked, 60)
        may_go_on.set()


async def test_sleep_by_http_needs_permission():
    engine = Engine(info=info_with(can_sleep=True))
    async with Group(engine) as group:
        service = Service(group, byte_tokenizer(), MODEL)
        key, elsewhere = {"authorization": "Bearer k"}, {"origin": "https://b.example"}
        with_keys, without = HttpSettings(api_key=("k",)), HttpSettings(cors_origin=("https://a.example",))
        async with client_of(service, with_keys) as http, client_of(service, without) as page:
            for path in ("/sleep", "/wake_up"):
                assert (await http.post(path)).status_code == 401
                assert (await page.post(path, headers=elsewhere)).status_code == 403
            for query, named in (("level=3", "level"), ("level=x", "level"), ("mode=abort", "mode")):
                refused = await http.post(f"/sleep?{query}", headers=key)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, named)
            assert not level(engine)
            for query, deep in (("", 1), ("?level=2", 2)):
                assert (await http.get("/is_sleeping", headers=key)).json() == {"is_sleeping": False}
                answer = await http.post(f"/sleep{query}", headers=key)
                assert (answer.status_code, answer.text, level(engine)) == (200, "", deep)
                assert (await http.get("/is_sleeping", headers=key)).json() == {"is_sleeping": True}
                assert (await http.get("/health")).status_code == 200
                metrics = (await http.get("/metrics", headers=key)).text
                assert f'callboard:sleep_level{{engine="0",model_name="{MODEL}"}} {deep}.0' in metrics
                refused = await http.post("/wake_up?tags=weights", headers=key)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tags")
                assert (await http.post("/wake_up", headers=key)).status_code == 200
            group.drain("The server is stopping.")
            assert (await http.post("/sleep", headers=key)).status_code == 503


async def test_a_server_sleeps_only_if_its_operator_allows_it():
    async with Group(engine := Engine()) as group, client_of(Service(group, byte_tokenizer(), MODEL)) as http:
        refused = await http.post("/sleep")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "sleep_not_allowed")
        assert "--sleep-mode" in refused.json()["error"]["message"]
        assert not level(engine)
