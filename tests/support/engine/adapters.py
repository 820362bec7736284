"""Adapters as folders, and streams that use them."""

import asyncio
from dataclasses import replace

from tests.support.engine.fake_runner import sequential
from tests.support.engine.links import request

MODULES = {"model.layers.0.self_attn.q_proj": (8, 8)}


def with_adapter(group, name, i=0, **params):
    return replace(request(i, **params), adapter=group.adapters.served()[name].digest)


def pace(engine, delay_s):
    """Set the time of steps: long enough for the test to disturb a stream, then zero."""
    engine.delay_s = engine.runners[-1].delay_s = delay_s


async def check(reading, asked):
    for (tokens, reason, _), req in zip(await asyncio.wait_for(reading, 60), asked, strict=True):
        assert (tokens, reason) == sequential(req, 512)
