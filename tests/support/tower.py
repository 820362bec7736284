"""Draws the tower of folders from the imports: a folder stands above its imports.

python -m tests.support.tower                       # the block in docs/architecture.md
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOPS = ("runtime", "actors", "serve_app")


def room_of(module: str) -> str:
    """The folder of a module below its package; "" for files next to the folders."""
    top, *rest = module.split(".")
    is_folder = bool(rest) and (ROOT / top / rest[0]).is_dir()
    return f"{top}.{rest[0]}" if is_folder else ""


def arrows() -> dict[str, set[str]]:
    """Room -> the rooms of the same package that it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):
            room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for node in ast.walk(ast.parse(path.read_text())) if room else ():
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    found[room] |= {other for name in node.names if (other := room_of(f"{node.module}.{name.name}"))}
    return {room: {other for other in others if other != room} for room, others in found.items()}


def floors() -> dict[str, list[list[str]]]:
    """Package -> its floors from the top: a room is one floor above the highest that it imports."""
    below = arrows()

    @cache
    def floor(room: str) -> int:
        top = room.split(".")[0]
        return max((1 + floor(other) for other in below.get(room, ()) if other.startswith(f"{top}.")), default=0)

    found = {}
    for top in TOPS:
        rooms = sorted(room for room in below if room.startswith(f"{top}."))
        found[top] = [
            [room.split(".")[1] for room in rooms if floor(room) == number]
            for number in range(max(map(floor, rooms)), -1, -1)
        ]
    return found


def drawing() -> str:
    """The tower as text, the roof first."""
    lines = []
    for top, rows in reversed(floors().items()):
        lines += [f" {top if number == 0 else '':10}|  {'   '.join(rooms)}" for number, rooms in enumerate(rows)]
        lines.append(f" {'':10}+{'-' * 72}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(drawing())
