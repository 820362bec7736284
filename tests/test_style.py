"""The limits of size and the rules of English that CONTRIBUTING.md names."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support import plain_english

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70
MAX_FOLDER_FILES = 15
MAX_TEST_NAME = 60
# a file for each family, format or command
GROWING_FOLDERS = {"runtime/models/families", "runtime/text/tool_calls", "serve_app/commands"}
FILES = [
    path
    for folder in ("runtime", "actors", "serve_app", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_files_are_short():
    long = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {path: lines for path, lines in long.items() if lines > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("folder", ["runtime", "actors", "serve_app", "tests", "benchmarks"])
def test_functions_fit_a_screen(folder: str):
    """Kernels of Triton excepted, which cannot call one another freely."""
    long = {}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] != folder:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if lines > MAX_FUNCTION_LINES and not is_kernel:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert long == {}


def test_files_are_named_after_their_content():
    """The name of a file is the name of its subject."""
    assert [str(path) for path in FILES if path.stem in ("utils", "helpers", "misc", "common")] == []


def test_folders_are_small():
    """The tests have as many files as there is to test."""
    numbers = Counter(str(path.parent.relative_to(ROOT)) for path in FILES)
    large = {folder for folder, number in numbers.items() if number > MAX_FOLDER_FILES}
    assert {folder for folder in large if not folder.startswith("tests/")} <= GROWING_FOLDERS


def test_lists_of_modules_are_whole():
    """A package that lists its modules, each on a line of its own, names all of them."""
    lacking = {}
    for path in (path for path in FILES if path.name == "__init__.py" and "tests" not in path.parts):
        listed = set(re.findall(r"^(?: {4})?([a-z_]+) {3,}\S", path.read_text("utf-8"), re.MULTILINE))
        modules = {other.stem for other in path.parent.glob("*.py")} - {"__init__"}
        if len(listed & modules) > 1 and modules - listed:
            lacking[str(path.relative_to(ROOT))] = modules - listed
    assert lacking == {}


def test_names_of_tests_are_short():
    names = {str(path.relative_to(ROOT)): re.findall(r"def (test_\w+)", path.read_text("utf-8")) for path in FILES}
    long = [f"{path}::{name}" for path in names for name in names[path] if len(name) > MAX_TEST_NAME]
    assert long == []


def test_sentences_are_in_plain_english():
    """Each file has exactly the findings that it is allowed, so their number can only fall."""
    found, allowed = plain_english.counts(), plain_english.allowance()
    more = {name: f"{found[name]} > {allowed.get(name, 0)}" for name in found if found[name] > allowed.get(name, 0)}
    assert more == {}, "list the sentences: python -m tests.support.plain_english FILE"
    fewer = {name: f"{found.get(name, 0)} < {allowed[name]}" for name in allowed if found.get(name, 0) < allowed[name]}
    assert fewer == {}, "lower the allowance: python -m tests.support.plain_english --write"


def test_genitives_become_rarer():
    """No package has more genitive chains, or much fewer, than its allowance, so their number can only fall."""
    rates, allowed = plain_english.genitive_rates(), plain_english.genitive_allowance()
    more = [
        f"{name}, {rule}: {rate} > {allowed.get(name, {}).get(rule, 0)}"
        for name in rates
        for rule, rate in rates[name].items()
        if rate > allowed.get(name, {}).get(rule, 0)
    ]
    assert more == [], "list the sentences: python -m tests.support.plain_english FOLDER"
    fewer = [
        f"{name}, {rule}: {rates.get(name, {}).get(rule, 0)} < {limit}"
        for name in allowed
        for rule, limit in allowed[name].items()
        if limit > plain_english.ENOUGH.get(rule, 0) and rates.get(name, {}).get(rule, 0) < 0.8 * limit - 10
    ]
    assert fewer == [], "lower the allowance: python -m tests.support.plain_english --write"
