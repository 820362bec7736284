"""Names that GPU tests patch. These tests run on no CI machine, so a renamed constant would fail much later."""

import ast
import importlib
from pathlib import Path
from pkgutil import resolve_name

import pytest

FOLDER = Path(__file__).parent


def patched(path: Path) -> list[tuple[ast.expr, str | None]]:
    """The first argument of each `setattr`, and the attribute's name if it is a separate argument."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    found = [call.args for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "setattr"]
    return [(target, value.value if isinstance(value, ast.Constant) else None) for target, value, *_ in found]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_gpu*.py")), ids=lambda path: path.stem)
def test_patched_names_exist(path: Path):
    module = importlib.import_module(f"tests.gpu.{path.stem}")
    for target, name in patched(path):
        if isinstance(target, ast.Constant):
            resolve_name(target.value)
        elif ast.unparse(target).partition(".")[0] in vars(module):  # not a local object
            assert hasattr(eval(ast.unparse(target), vars(module)), str(name)), (ast.unparse(target), name)
