"""The end of a request from outside: its client leaves, the server stops it, or its deadline passes."""

import asyncio

import pytest

from serve_app.http.limits import Deadline
from serve_app.protocol.errors import ApiError
from serve_app.service.generation import UntilClientLeaves


class Client:
    """The two ends of a request. The client sends nothing more, and leaves or stays."""

    def __init__(self, *, leaves: bool) -> None:
        self.leaves, self.num_asked = leaves, 0

    async def receive(self):
        self.num_asked += 1
        if not self.leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        pass


async def test_a_short_answer_leaves_no_task():
    client, tasks = Client(leaves=True), asyncio.all_tasks()
    async with UntilClientLeaves(client.receive, client.send) as send:
        await send({})
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert client.num_asked == 0
    assert asyncio.all_tasks() == tasks


async def test_a_client_that_left_at_once_is_noticed():
    client, tasks = Client(leaves=True), asyncio.all_tasks()
    async with asyncio.timeout(60), UntilClientLeaves(client.receive, client.send):
        await asyncio.Event().wait()
    await asyncio.sleep(0)
    assert client.num_asked == 1
    assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_cancellation_by_the_server_is_passed_on(leaves: bool):
    client, begun = Client(leaves=leaves), asyncio.Event()

    async def answer():
        async with UntilClientLeaves(client.receive, client.send):
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:  # it takes until the client has been looked for
                if leaves:
                    with pytest.raises(asyncio.CancelledError):
                        await asyncio.sleep(5)

    task = asyncio.create_task(answer())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


async def test_only_the_deadline_becomes_a_504():
    with pytest.raises(ApiError, match=r"0\.01 s, request_timeout_s") as refusal:
        async with Deadline(0.01):
            await asyncio.Event().wait()
    assert refusal.value.status == 504
    for seconds in (None, 60):
        with pytest.raises(TimeoutError, match="mine"):
            async with Deadline(seconds):
                raise TimeoutError("mine")
