"""The compiler's queue: abandoned, small and excess requests. Its children wait for the test."""

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest

from runtime.base.types import Grammar, GrammarSpec
from runtime.structured import compiler
from runtime.structured.compiler import CompilerBusy, GrammarCompiler
from runtime.structured.pattern import GrammarError
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, chat


class Children:
    """In the place of processes: each piece of work is noted when it begins, and ends when it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._changed, self._free = threading.Condition(), set[str]()

    def __call__(self, max_children: int, *args: object) -> "Children":
        return self

    def start(self) -> None:
        pass

    def run(self, deadline_s: float, function: object, spec: GrammarSpec) -> Grammar:
        with self._changed:
            self.begun.append(spec.text)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: spec.text in self._free or "all" in self._free, 60)
        if "bad" in spec.text:
            raise GrammarError("is bad")
        return Grammar(spec.text, "", "")

    def close(self) -> None:
        pass

    def free(self, *texts: str) -> None:
        with self._changed:
            self._free |= set(texts)
            self._changed.notify_all()

    async def until_begun(self, num: int) -> list[str]:
        """Return the specifications that have begun, once there are `num`."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: len(self.begun) >= num, 60)

        assert await asyncio.to_thread(wait)
        return self.begun


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    fake = Children()
    monkeypatch.setattr(compiler, "ChildPool", fake)
    yield fake
    fake.free("all")


def large(name: str) -> GrammarSpec:
    return GrammarSpec("json", f"pattern {name}")


def small(name: str) -> GrammarSpec:
    return GrammarSpec("regex", name)


async def asked(grammars: GrammarCompiler, *specs: GrammarSpec) -> list[asyncio.Task[Grammar]]:
    """Tasks that wait for their answers by now."""
    tasks = [asyncio.create_task(grammars.compile(spec)) for spec in specs]
    await asyncio.sleep(0)
    return tasks


async def leave(*tasks: asyncio.Task[Grammar]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_what_nobody_waits_for_is_not_compiled(children: Children):
    grammars = GrammarCompiler(max_children=2)
    first, *others = await asked(grammars, *(large(str(i)) for i in range(6)))
    shared = await asked(grammars, large("3"))
    assert await children.until_begun(1) == ["pattern 0"]
    await leave(*others)
    assert len(grammars._open) == 2
    (last,) = await asked(grammars, large("last"))
    children.free("all")
    assert [(await task).key for task in (first, *shared, last)] == ["pattern 0", "pattern 3", "pattern last"]
    assert children.begun == ["pattern 0", "pattern 3", "pattern last"]
    (again,) = await asked(grammars, large("1"))  # as if it had never been asked for
    assert (await again).key == "pattern 1"
    assert not grammars._open
    grammars.close()


async def test_what_was_begun_is_kept_for_the_next(children: Children):
    grammars = GrammarCompiler(max_children=2)
    tasks = await asked(grammars, large("a"), small("bad"))
    await children.until_begun(2)
    await leave(*tasks)
    children.free("all")
    assert (await grammars.compile(large("a"))).key == "pattern a"
    with pytest.raises(GrammarError, match="is bad"):
        await grammars.compile(small("bad"))
    assert sorted(children.begun) == ["bad", "pattern a"]
    grammars.close()


async def test_one_child_is_for_small_ones(children: Children):
    grammars = GrammarCompiler(max_children=3)
    many = await asked(grammars, *(large(str(i)) for i in range(20)))
    await children.until_begun(2)
    quick = await asked(grammars, small("a"), small("b"))
    assert (await children.until_begun(3))[2] == "a"
    children.free("a", "b")
    assert [(await task).key for task in quick] == ["a", "b"]
    assert sorted(children.begun) == ["a", "b", "pattern 0", "pattern 1"]
    children.free("pattern 1")
    assert (await many[1]).key == "pattern 1"
    assert (await children.until_begun(5))[4] == "pattern 2"
    await leave(*many)
    grammars.close()


@pytest.mark.parametrize(
    ("spec", "is_small"),
    [
        (GrammarSpec("regex", "(a|b)*" * 600), True),
        (GrammarSpec("regex", "(a|b)*" * 700), False),
        (GrammarSpec("choice", '["pattern"]'), True),
        (GrammarSpec("json", '{"type":"object"}'), True),
        (GrammarSpec("json", '{"patternProperties":{}}'), False),
        (GrammarSpec("json", '{"\\u0061llOf":[]}'), False),
        (GrammarSpec("calls", '{"functions":{"f":{"allOf":[]}}}'), False),
    ],
)
def test_small_is_what_takes_no_long_time_to_compile(spec: GrammarSpec, is_small: bool):
    assert compiler._is_small(spec) == is_small


async def test_small_grammars_have_places_in_a_full_queue(children: Children):
    grammars = GrammarCompiler(deadline_s=5.0, max_children=2, max_queued=3)
    tasks = await asked(grammars, *(large(str(i)) for i in range(4)))
    await children.until_begun(1)
    with pytest.raises(CompilerBusy, match="3 grammars wait") as refused:
        await grammars.compile(large("one too many"))
    assert refused.value.retry_after_s == 5.0
    same = await asked(grammars, large("3"))  # shares the place of an equal one
    tasks += await asked(grammars, *(small(str(i)) for i in range(4)))
    await children.until_begun(2)
    with pytest.raises(CompilerBusy):
        await grammars.compile(small("one too many"))
    await leave(tasks.pop(1))
    tasks += await asked(grammars, large("in its place"))
    children.free("all")
    assert (await tasks[-1]).key == "pattern in its place"
    await asyncio.gather(*tasks, *same)
    assert not grammars._open
    grammars.close()


async def test_a_full_queue_names_the_time_to_retry(children: Children, monkeypatch: pytest.MonkeyPatch):
    grammars = GrammarCompiler(deadline_s=2.5, max_children=2, max_queued=1)
    monkeypatch.setattr("serve_app.service.service.GrammarCompiler", lambda: grammars)
    app = build_http_app(Service(FakeEngine("{}"), byte_tokenizer(), MODEL))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        schemas = [{"type": "string", "pattern": str(i)} for i in range(3)]
        bodies = [chat(response_format={"type": "json_schema", "schema": schema}) for schema in schemas]
        begun, queued = (asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in bodies[:2])
        await children.until_begun(1)
        while len(grammars._open) < 2:
            await asyncio.sleep(0)
        response = await client.post("/v1/chat/completions", json=bodies[2])
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "grammars_busy", None)
        assert error["message"] == "1 grammars wait to be compiled, the limit; come back in 2.5 seconds."
        children.free("all")
        assert [(await task).status_code for task in (begun, queued)] == [200, 200]
    grammars.close()


async def test_one_key_leaves_places_in_the_queue(children: Children):
    grammars = GrammarCompiler(deadline_s=5.0, max_children=2, max_queued=7)
    tasks = [asyncio.create_task(grammars.compile(large(str(i)), "a")) for i in range(6)]
    await children.until_begun(1)
    with pytest.raises(CompilerBusy, match="6 grammars of your API key"):
        await grammars.compile(large("one too many"), "a")
    tasks.append(asyncio.create_task(grammars.compile(large("of another key"), "b")))
    await asyncio.sleep(0)
    assert len(grammars._open) == 7
    children.free("all")
    await asyncio.gather(*tasks)
    grammars.close()
