"""Rows of the table "Where would I" in docs/architecture.md name all files of their subject."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = {  # beginning of a row -> what each file of its subject has
    "a filter such as": r"\b(min_p|MIN_P)\b",
    "a reason for a 429": r"ApiError\(429|Refusal\.BUSY[,:]|, 429, \"too",
    "what an output reports": r"base\.reports import .*\b(PromptScores|Vector|Experts|one_of|all_of|prompt_entries)\b",
    "a field of `Request`": r"(?m)^class Request:|(?<!def )\brequests_of\(",
    "a format of tool calls": r"\bnemotron\b",
    "a field of `NewSlot`": r"\bNewSlot\(|\bnew\.(seed|snapshot|state|adapter|prompt_len)\b",
    "a GGUF type": r"Q5_K",
    "a scoring function of experts": r"softmax_of_chosen",
    "the tile sizes of a GEMM": r"(?m)^def \w+\(.*\) -> (Tile|Tiling|\w*Gem[mv]Config|\w*SkinnyConfig):|^TILES =",
    "how snapshots of states": r"\bSnapshotPool\b",
}
SPREAD = {  # beginnings of the rows with more than five files
    "a field of one API",
    "a reason for a 429",
    "how a grammar's mask",
    "what an output reports",
    "a product with quantized weights",
}
SOURCES = [
    path
    for folder in ("runtime", "actors", "serve_app")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".js") and "vendor" not in path.parts
]


@pytest.mark.parametrize("beginning", ROWS)
def test_row_names_all_files_of_its_subject(beginning: str):
    lines = (ROOT / "docs/architecture.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith(f"| {beginning}"))
    places = re.findall(r"`((?:runtime|actors|serve_app)/[^`]*)`", row)
    missing = [path for path in places if not (ROOT / path).exists()]
    files = {path.relative_to(ROOT).as_posix() for path in SOURCES if re.search(ROWS[beginning], path.read_text())}
    assert files, "the subject has other words now"
    unnamed = {
        f for f in files if not any(f == place or (place.endswith("/") and f.startswith(place)) for place in places)
    }
    assert (unnamed, missing) == (set(), [])


def test_few_rows_name_more_than_five_files():
    """A change that touches more is one to mend in the code."""
    rows = [line.removeprefix("| ") for line in (ROOT / "docs/architecture.md").read_text().splitlines()]
    spread = [row for row in rows if len(set(re.findall(r"`((?:runtime|actors|serve_app|tests)/[^`]*)`", row))) > 5]
    assert [row for row in spread if not row.startswith(tuple(SPREAD))] == []
    assert len(spread) == len(SPREAD)
