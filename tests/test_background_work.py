"""Two shapes of a lost fault: work with an exception that no code reads, and endless retries without a word."""

import ast
import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from runtime.background import in_background

ROOT = Path(__file__).parent.parent
FILES = sorted(path for name in ("runtime", "actors", "serve_app") for path in (ROOT / name).rglob("*.py"))
STARTS = {"create_task", "ensure_future", "run_coroutine_threadsafe", "run_in_executor"}
# They take a future and hand on its exception.
READERS = {"in_background", "gather", "wrap_future", "shield", "wait_for", "as_completed", "_finish"}


def name_of(node: ast.AST) -> str:
    """The last part of a name, without underscores before it."""
    if isinstance(node, ast.Subscript | ast.Starred):
        return name_of(node.value)
    return (getattr(node, "attr", "") or getattr(node, "id", "")).lstrip("_")


@cache
def pools() -> frozenset[str]:
    """The names that a pool of threads or processes has anywhere."""
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.withitem):
                value = node.context_expr if isinstance(node, ast.withitem) else node.value
                if isinstance(value, ast.Call) and name_of(value.func).endswith("PoolExecutor"):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.__dict__.get("target")]
                    found |= {name_of(t) for t in [*targets, node.__dict__.get("optional_vars")] if t is not None}
    return frozenset(found)


def is_start(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = name_of(node.func)
    if name == "create_task" and isinstance(node.func, ast.Attribute) and name_of(node.func.value) == "group":
        return False  # a TaskGroup raises the exceptions of its tasks
    return name in STARTS or (name == "submit" and name_of(getattr(node.func, "value", node)) in pools())


def names_read(tree: ast.AST) -> set[str]:
    """The names of futures with exceptions that the code reads or hands on."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Await | ast.Return) and node.value is not None:
            found.add(name_of(node.value))
        elif isinstance(node, ast.Call):
            if name_of(node.func) in READERS:
                found |= {name_of(arg) for arg in node.args}
            elif isinstance(node.func, ast.Attribute) and node.func.attr in ("result", "exception"):
                found.add(name_of(node.func.value))
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "add_done_callback":
                called = name_of(node.args[0])
                functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and name_of_def(f) == called]
                if any("exception" in ast.dump(f) for f in functions):
                    found.add(name_of(node.func.value))
    return found - {""}


def name_of_def(node: ast.FunctionDef) -> str:
    return node.name.lstrip("_")


def unread(source: str) -> Iterator[int]:
    """The lines that start work with an exception that no code reads."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    read = names_read(tree)
    for node in filter(is_start, ast.walk(tree)):
        parent = parents[node]
        while isinstance(parent, ast.List | ast.ListComp | ast.IfExp | ast.Starred | ast.Tuple):
            parent = parents[parent]
        if isinstance(parent, ast.Await | ast.Return):
            continue
        if isinstance(parent, ast.Call) and name_of(parent.func) in READERS:
            continue
        if isinstance(parent, ast.Attribute) and parent.attr in ("result", "exception"):
            continue
        targets = parent.targets if isinstance(parent, ast.Assign) else [getattr(parent, "target", None)]
        if not any(target is not None and name_of(target) in read for target in targets):
            yield node.lineno


def silent_retries(source: str) -> Iterator[int]:
    """Handlers in endless loops that catch everything, neither end the loop nor report the exception."""
    for loop in ast.walk(ast.parse(source)):
        if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant):
            for handler in (node for node in ast.walk(loop) if isinstance(node, ast.ExceptHandler)):
                is_broad = handler.type is None or name_of(handler.type) in ("Exception", "BaseException")
                inner = [node for part in handler.body for node in ast.walk(part)]
                reports = any(isinstance(node, ast.Name) and node.id in ("logger", handler.name) for node in inner)
                ends = any(isinstance(node, ast.Raise | ast.Return | ast.Break) for node in inner)
                if is_broad and not reports and not ends:
                    yield handler.lineno


def silent_ends(source: str) -> Iterator[int]:
    """Handlers around the decoding of messages that report nothing."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and "DecodeError" in ast.dump(node.type or node):
            yield from [node.lineno] if all(isinstance(part, ast.Pass | ast.Continue) for part in node.body) else []


@pytest.mark.parametrize("find", [unread, silent_retries, silent_ends])
def test_no_fault_is_lost(find):
    wrong = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in find(path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "asyncio.create_task(work())",
        "self._task = asyncio.create_task(work())\nself._task.cancel()",
        "task = loop.create_task(work())\ntasks.add(task)\ntask.add_done_callback(tasks.discard)",
        "async def run(self):\n task = create_task(work())\n task.add_done_callback(self._ended)\n"
        "def _ended(task):\n tasks.discard(task)",
        "asyncio.run_coroutine_threadsafe(work(), loop)",
        "loop.run_in_executor(None, work)",
        "pool = ThreadPoolExecutor()\npool.submit(work)",
        "tasks.append(asyncio.ensure_future(work()))",
    ],
)
def test_unread_work_is_found(source):
    assert list(unread(source))


@pytest.mark.parametrize(
    "source",
    [
        "async def f():\n await asyncio.create_task(work())",
        "async def f():\n task = asyncio.create_task(work())\n await task",
        "in_background(asyncio.create_task(work()), 'work')",
        "asyncio.run_coroutine_threadsafe(work(), loop).result()",
        "task = asyncio.create_task(work())\ntask.add_done_callback(ended)\ndef ended(task):\n print(task.exception())",
        "async def f():\n tasks = [asyncio.create_task(work()) for _ in range(3)]\n await asyncio.gather(*tasks)",
    ],
)
def test_read_work_is_not_found(source):
    assert not list(unread(source))


def test_silent_handlers_are_found():
    assert list(silent_retries("while True:\n try:\n  send()\n except Exception:\n  time.sleep(1)"))
    assert not list(silent_retries("while True:\n try:\n  send()\n except Exception as e:\n  logger.warning(e)"))
    assert list(silent_ends("try:\n decode()\nexcept (OSError, msgspec.DecodeError):\n pass"))


async def test_a_lost_exception_is_logged(caplog):
    async def fail() -> None:
        raise ValueError("no more paper")

    task = in_background(asyncio.create_task(fail()), "the printer")
    with ThreadPoolExecutor() as pool:
        in_background(pool.submit(lambda: 1 // 0), "the division")
    cancelled = in_background(asyncio.create_task(asyncio.sleep(9)), "the nap")
    cancelled.cancel()
    await asyncio.wait((task, cancelled))
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "the division failed",
        "the printer failed",
    ]
    assert "no more paper" in caplog.text
