"""Numbers and drawings of the README and docs/architecture.md equal the tree."""

import re
from pathlib import Path

from tests.support.tower import drawing, floors

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_readme_states_the_lines_of_the_core():
    """docs/reading.md counts them with `grep -o '^### .*`' docs/reading.md | cut -d'`' -f2 | xargs wc -l`."""
    files = re.findall(r"^### [^`]*`([^`]*)`", (ROOT / "docs/reading.md").read_text(), re.MULTILINE)
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in files)
    stated = re.search(r"a core\sof fewer than ([\d,]+) lines", README)
    assert stated is not None
    assert len(files) > 10
    bound = int(stated[1].replace(",", ""))
    assert bound - 500 < lines < bound, f"The core has {lines} lines; state the next 500 in README.md."


def test_readme_fits_on_a_screen_or_two():
    assert len(README.splitlines()) <= 100


def test_readme_has_no_placeholder():
    assert re.findall(r"\b(?:REPOSITORY|FOLDER|YOUR_\w+)\b|<[a-z ]+>", README) == []


def test_architecture_shows_the_tower_of_folders():
    page = (ROOT / "docs/architecture.md").read_text()
    assert f"```\n{drawing()}\n```" in page, "Replace the drawing by the output of `python -m tests.support.tower`."
    assert floors()["runtime"][-1] == ["base"]
