"""A real draft process beside a real engine: guesses arrive, and its death or silence only costs speed (C8)."""

import asyncio
import os
import signal
import time

import pytest

from serve_app.processes.application_processes import processes_of
from tests.support.processes.server import Server, wait_for

pytestmark = pytest.mark.usefixtures("ray_session")


async def accepted(server):
    return (await server.engine().stats.remote())["accepted_draft_tokens"]


async def generate_until_guessed(server, want):
    """A hundred more tokens. On a busy machine guesses are late, and an answer may end without one."""
    before, end = await accepted(server), time.monotonic() + 120
    while await accepted(server) < before + 100:
        assert time.monotonic() < end
        assert await server.generate() == want
        await asyncio.sleep(0.3)  # a new draft needs the cores, too


@pytest.mark.thorough
async def test_a_killed_or_stopped_draft_changes_no_token(tiny_path, undisturbed):
    """The draft is the model itself, so that every guess is right while it lives."""
    draft = {"draft": str(tiny_path), "num_draft_tokens": 3, "draft_kv_cache_memory": 0.1}
    async with Server("drafted", tiny_path, **draft) as server:
        await generate_until_guessed(server, undisturbed)
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            pid = await server.draft_pid()
            progress: list[int] = []
            reading = asyncio.create_task(server.generate(progress))
            await wait_for(lambda progress=progress: sum(progress) > 40, 60)
            os.kill(pid, signal_number)
            assert await reading == undisturbed
            assert server.link.health() is None
            if signal_number == signal.SIGSTOP:  # another one replaces it
                await generate_until_guessed(server, undisturbed)
                assert await server.draft_pid() != pid


@pytest.mark.thorough
async def test_two_engines_share_a_draft(tiny_path):
    config = {"draft": str(tiny_path), "num_draft_tokens": 3, "draft_kv_cache_memory": 0.1, "draft_shared": True}
    async with Server("shared/0", tiny_path, **config) as a, Server("shared/1", tiny_path, **config) as b:
        assert await a.draft_pid() == await b.draft_pid()
        (draft,) = [p for p in processes_of("", "shared") if p.role == "draft"]
        assert (draft.engine, draft.pid) == ("shared", await a.draft_pid())
        expected, end = None, time.monotonic() + 120
        while True:  # six processes on a machine with two cores: the number of timely guesses varies
            first, second = await asyncio.gather(a.generate(), b.generate())
            expected = expected or first
            assert first == second == expected
            if min(await accepted(a), await accepted(b)) > 100:
                break
            assert time.monotonic() < end, "one of them is served, or neither"
