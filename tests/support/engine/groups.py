"""A replica's group of several engine loops, and waits for its state."""

import asyncio
from dataclasses import replace

from tests.support.engine.fake_runner import sequential
from tests.support.engine.links import INFO, eventually, link_to, request


def info_with(**changes):
    return replace(INFO, **changes)


class Group:
    """An EngineGroup over fresh engines, which it closes at its end."""

    def __init__(self, *engines):
        self.engines, self.group = engines, link_to(*engines)

    async def __aenter__(self):
        await self.group.start()
        await eventually(lambda: len(healthy(self.group)) == sum(e.loop is not None for e in self.engines))
        return self.group

    async def __aexit__(self, *_):
        self.group.close()
        for engine in self.engines:
            if engine.loop is not None:
                engine.loop.close()


def healthy(group):
    return [link for link in group.links.values() if link.usable and not link.reason]


def running(engine):
    return engine.loop.stats()["running"]


def live(engine):
    return len(engine.loop.core.scheduler.requests)


async def check(reading, count, max_tokens):
    for i, (tokens, reason, _) in enumerate(await asyncio.wait_for(reading, 60)):
        assert (tokens, reason) == sequential(request(i, max_tokens=max_tokens), 512)
    assert i + 1 == count


class link_closing:
    def __init__(self, group):
        self.group = group

    async def __aenter__(self):
        return self.group

    async def __aexit__(self, *_):
        self.group.close()
