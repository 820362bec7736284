"""docs/invariants.md defines every contract that the tree cites, and names only what exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "invariants.md").read_text()
CONTRACTS = dict(re.findall(r"^## (C\d+)\. .+\n((?:(?!## ).*\n)+)", PAGE, re.MULTILINE))
CITATION = re.compile(r"\bC\d{1,2}\b")


def cited() -> dict[str, list[str]]:
    """The files that cite each contract."""
    found: dict[str, list[str]] = {}
    for folder in ("runtime", "actors", "serve_app", "tests", "benchmarks", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md") and path.name != "RESULTS.md":
                for number in set(CITATION.findall(path.read_text())):
                    found.setdefault(number, []).append(str(path.relative_to(ROOT)))
    return found


def test_every_cited_contract_is_defined():
    assert {number: paths for number, paths in cited().items() if number not in CONTRACTS} == {}
    assert list(CONTRACTS) == [f"C{i}" for i in range(1, len(CONTRACTS) + 1)]


@pytest.mark.parametrize("number", CONTRACTS)
def test_names_in_a_contract_exist(number: str):
    text = CONTRACTS[number]
    why, upheld, held = (text.partition(f"**{part}")[2].partition("- **")[0] for part in ("Why", "Upheld", "Held"))
    assert why
    files = re.findall(r"`([\w/]+\.py)`", upheld)
    assert files
    assert [path for path in files if not (ROOT / path).is_file()] == []
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", held)
    assert tests
    assert [(path, name) for path, name in tests if not re.search(rf"def {name}\(", _text(path))] == []


def _text(path: str) -> str:
    return (ROOT / path).read_text() if (ROOT / path).is_file() else ""


PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_resolve(page: Path):
    """To files, and to headings of pages as GitHub names them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        target = page if not path else page.parent / path
        if "://" not in link and not (target.exists() and (not heading or heading in _headings(target))):
            lost.append(link)
    assert lost == []


def _headings(page: Path) -> list[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_pages_exist(page: Path):
    named = re.findall(r"`((?:runtime|actors|serve_app|tests|benchmarks|docs|\.ci)/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []
    modules = [name.replace(".", "/") for name in re.findall(r"python -m (benchmarks(?:\.\w+)+)", page.read_text())]
    assert [m for m in modules if not (ROOT / f"{m}.py").exists() and not (ROOT / m / "__main__.py").exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_pages_place_in_files_exist(page: Path):
    """As in `name` of `path/file.py`."""
    text = " ".join(page.read_text("utf-8").split())
    found = re.findall(r"((?:`\w+`, )*`\w+`) of `((?:runtime|actors|serve_app|benchmarks|tests)/[\w./]+)`", text)
    places = [(name, path) for names, path in found for name in re.findall(r"`(\w+)`", names)]
    assert [place for place in places if not re.search(rf"\b{place[0]}\b", _text(place[1]))] == []
