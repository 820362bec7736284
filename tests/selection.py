"""Which tests a session runs, in which order, and on which of its workers: a plugin of pytest.

    pytest                 the tests that a change needs: minutes on two cores; it lists the tests left out
    pytest --share 2/20    also the second twentieth of the others that need no GPU; CI runs one
    pytest --all           every test; CALLBOARD_TESTS=all gives property tests more examples
    pytest FILE, -m MARK   the named tests, slow ones too
    python -m tests.selection   prints the tests that CI also runs with the oldest version of Ray

All cores are used (pytest-xdist), unless a few files or tests are named. A file's tests share their
fixtures, so they stay on one worker. So do all tests that start Ray, and all tests that start other processes. Two
workers begin with these groups, which mostly wait. All others begin with quick tests.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
# The needs of a test beyond a second of one core, by its folder and by its fixtures.
RESOURCES_OF_FOLDERS = {"processes", "triton", "compile", "browser", "gpu"}
RESOURCES_OF_FIXTURES = {"smollm2_path": "model", "gemma3_path": "thorough", "ray_session": "ray"}
# The order of a session: quick tests first, then the tests that take one worker longest.
ORDER = ("fast", "compile", "processes", "ray", "browser", "triton", "model", "long", "thorough", "gpu")
# What depends on the version of Ray: its private parts, a start, requests, deaths and a stop.
OLDEST_RAY = (
    "tests/actors/test_private_ray.py",
    "tests/actors/test_fork_server.py::test_worker_modules_are_safe_to_fork",
    "tests/processes/test_actors.py",
    "tests/processes/test_serve.py",
    "tests/processes/test_start_and_stop.py::test_a_server_from_start_to_stop",
)
_WORKER_GIB = 9  # of a GPU's memory, which tests/gpu needs for each worker
_PROCESSES = "tests/processes/"
# Files of tests/processes without Ray. Two Rays that start at the same time may take each other's ports.
_WITHOUT_RAY = {"haproxy", "port", "process_tree", "rank_runners", "rank_tier", "rank_updates", "ranks"}
# mark -> why a session without --all leaves such tests out. With --share it runs a part, unless they need a GPU.
# The first mark of a test counts.
LEFT_OUT = {
    "gpu": "kernels on a CUDA device",
    "thorough": "more cases of what other tests cover",
    "rotated": "run in turns, since they are many and alike, or long",
}
# file or folder -> n: each n-th of its tests runs always, and the others are rotated. The first that fits counts.
# An odd n takes both values of a parameter with two, such as the backend.
ONE_IN = {
    "core/test_draft_under_faults.py": 3,
    "core/test_images.py": 3,
    "core/test_speculation_policy.py": 5,
    "core/test_step_pacing.py": 3,
    "grammar/test_free_names.py": 5,
    "grammar/test_structured_engines.py": 5,
    "grammar/test_structured_schema.py": 5,
    "grammar/test_structured_steps.py": 5,
    "grammar/test_white_space.py": 5,
    "kernels/test_states.py": 15,
    "kernels/test_twins.py": 21,
    "kernels": 9,
    "serve/test_costly_requests.py": 5,
    "serve/test_event_ids.py": 5,
    "serve/test_forced_calls.py": 5,
    "serve/test_openapi.py": 25,
    "serve/test_special_marks.py": 5,
    "serve/test_tool_call_formats.py": 5,
    "text/test_control_tokens.py": 5,
    "text/test_own_templates.py": 5,
    "text/test_text_stream.py": 5,
    "benchmarks": 5,
    "browser": 15,
    "cpu_kernels": 5,
    "heads": 15,
    "media": 15,
    "models": 15,
    "ops": 5,
    "processes": 15,
    "tier": 9,
    "triton": 15,
    "updates": 15,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run everything: see tests/selection.py")
    parser.addoption("--share", type=_share, metavar="K/N", help="run the K-th of N shares of the thorough tests, too")


def _share(text: str) -> tuple[int, int]:
    """(index, number) of a share such as 2/4."""
    k, n = map(int, text.split("/"))
    if not 1 <= k <= n:
        raise ValueError
    return k - 1, n


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Whole folders get one worker more than there are cores, because the tests of one worker mostly wait for
    processes.

    Named tests run in this process, which starts in half the time."""
    if any(not Path(argument).is_dir() for argument in config.args):
        config.option.dist = "no"
        return 0
    most = len(os.sched_getaffinity(0)) + 1
    if (gpu_gib := _gpu_gib()) is not None:
        most = min(most, max(1, gpu_gib // _WORKER_GIB))
    return most


def _gpu_gib() -> int | None:
    """The memory of the smallest GPU, in GiB, or None without one."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return min((int(line) >> 10 for line in done.stdout.split()), default=None) if done.returncode == 0 else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to the workers in their order."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid) or super()._split_scope(nodeid)

    return ByFile(config, log)


def _group(nodeid: str) -> str:
    """The group of files on one worker that has this test, or an empty name."""
    if not nodeid.startswith(_PROCESSES):
        return ""
    name = nodeid.removeprefix(f"{_PROCESSES}test_").partition(".py")[0]
    return "processes" if name in _WITHOUT_RAY else "Ray"


def needs(item: pytest.Item) -> set[str]:
    """The marks of an item: resources, or `fast`."""
    fixtures = getattr(item, "fixturenames", ())
    found = {item.path.relative_to(TESTS).parts[0]} & RESOURCES_OF_FOLDERS
    found |= {resource for fixture, resource in RESOURCES_OF_FIXTURES.items() if fixture in fixtures}
    found |= {mark.name for mark in item.iter_markers() if mark.name in ORDER}
    return found or {"fast"}


def _is_everything(config: pytest.Config) -> bool:
    """True if all tests run: with --all, or if tests are named by path or by mark."""
    names_tests = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return bool(config.getoption("--all") or names_tests or config.getoption("markexpr"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark items by their needs, drop the ones that this session leaves out, and order their files."""
    ranks: dict[Path, int] = {}
    _mark_repeated_cases(items)
    marks = {item: needs(item) for item in items}
    for item, names in marks.items():
        for name in names:
            item.add_marker(name)
    if not _is_everything(config):
        _leave_out(config, items)
    has_others = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1  # that begin with the quick tests
    for item in items:
        is_first = has_others and item.nodeid.startswith(_PROCESSES)
        needed = marks[item] - {"thorough"} or marks[item]
        ranks[item.path] = -1 if is_first else max(ranks.get(item.path, 0), *map(ORDER.index, needed))
    items.sort(key=lambda item: ranks[item.path])


def _mark_repeated_cases(items: list[pytest.Item]) -> None:
    """Of a test with `one_in(n)`, each n-th case runs always, from the first on, and the others are thorough. Others in
    ONE_IN are rotated."""
    counts: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            group, n, name = item.nodeid.partition("[")[0], mark.args[0], "thorough"
        else:
            path = item.path.relative_to(TESTS).as_posix()
            group, n = next((pair for pair in ONE_IN.items() if path.startswith(pair[0])), ("", 1))
            name = "rotated"
        if counts[group] % n:
            item.add_marker(name)
        counts[group] += 1


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    left: Counter[str] = Counter()
    kept, dropped = [], []
    index, shares = config.getoption("--share") or (-1, 1)
    num_shared = 0
    for item in items:
        name = next((name for name in LEFT_OUT if item.get_closest_marker(name)), None)
        if name in ("thorough", "rotated"):
            name = None if num_shared % shares == index else name
            num_shared += 1
        if name is None:
            kept.append(item)
        else:
            left[name] += 1
            dropped.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
    config.stash[_LEFT] = left


_LEFT = pytest.StashKey[Counter[str]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist, which collects for the controller
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(_LEFT, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if left := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_LEFT] = Counter(left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        parts = "; ".join(f"{number} ({reason})" for reason, number in reasons.most_common())
        terminalreporter.write_line(f"Skipped: {parts}.")
    if most := config.getoption("durations"):
        _write_longest(terminalreporter, most)
    if left := config.stash.get(_LEFT, None):
        parts = [f"{number} of {name} ({LEFT_OUT[name]})" for name, number in left.items()]
        terminalreporter.write_line(f"Left out: {', '.join(parts)}. `pytest --all` runs everything.")


def _write_longest(terminalreporter: pytest.TerminalReporter, most: int) -> None:
    """Write the seconds of the tests that take longest with all their cases, setup included."""
    seconds, num_cases = Counter[str](), Counter[str]()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            test = report.nodeid.partition("[")[0]
            seconds[test] += report.duration
            num_cases[test] += report.when == "call"
    terminalreporter.section(f"{most} of {len(seconds)} tests, {sum(seconds.values()):,.0f} s: all cases of each")
    for test, total in seconds.most_common(most):
        terminalreporter.write_line(f"{total:7.1f} s  {num_cases[test]:4} cases  {test}")


if __name__ == "__main__":
    print(*OLDEST_RAY)
