"""Find sentences that break a rule of plain English, in docstrings, comments and Markdown.

    python -m tests.support.plain_english                    findings by file, against their allowance
    python -m tests.support.plain_english --write            write the allowance
    python -m tests.support.plain_english FILE_OR_FOLDER...  list the findings there

CONTRIBUTING.md has the rules. Code spans, indented or fenced code, tables and headings are left out.
The genitive rules are counted by package, as rates, so that a package may grow and shrink: see `genitive_rates`.
"""

import argparse
import ast
import functools
import json
import math
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ALLOWANCE = ROOT / "tests" / "data" / "plain_english.json"
GENITIVES = ROOT / "tests" / "data" / "genitives.json"
MAX_WORDS = 25  # words in one sentence
MAX_PARAGRAPH_WORDS = 60  # words in one Markdown paragraph
RULES = {
    "a component is not a person": r"\b(who|whoever|whom|whose|nobody|somebody|everybody|anybody)\b",
    "send, report or request": r"\b(tells?|told|says?|said|hears?|heard|asks? for|speaks?)\b",
    "sentence within a relative clause": r"\b(of (which|whom)|that which|those (of|that|which)|what (is|has|it))\b",
    "so many, as far as": r"\b(so (many|much|far as)|as (far|long|many|soon) as)\b",
    "is not, instead of is no": r"\b(is|are|was|were|has|have|needs?) no\b",
    "elliptic None:": r"(^|[.;:] )(None|False|True|Empty|0|-1): ",
    "it is X that": r"\b[Ii]t is \w+ (that|which|who)\b",
    "let": r"\b[Ll]et (it|them|streams|requests|others)\b",
}
_PATTERNS = {rule: re.compile(pattern) for rule, pattern in RULES.items()}
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_PREPOSITION = re.compile(
    r"(Of|By|Beside|of|by|for|in|on|at|with|from|to|under|over|between|beside|within|without|against|than|into|onto"
    r"|through|behind|above|below|among|like|as|per)\b"
)
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[(])|\n\s*\n|\n\s*[-*] ")
_INDENTED = re.compile(r"(?<=\n\n)(    .*\n?)+")
_ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+", re.MULTILINE)


# A little above the measures of code bases that read well: an allowance does not fall below these.
ENOUGH = {
    "of, in 10,000 words": 200,
    "of ... of, in 1,000 sentences": 15,
    "begins with a preposition, in 1,000 comments": 15,
    "beside": 3,
}


class Finding(NamedTuple):
    line: int
    rule: str
    text: str


def findings(path: Path) -> list[Finding]:
    """Each rule that a text of the file breaks, once for each sentence."""
    found = []
    is_markdown = path.suffix == ".md"
    for line, text, sentences in _texts(path):
        if is_markdown and len(text.split()) > MAX_PARAGRAPH_WORDS:
            found.append(Finding(line, f"paragraph of more than {MAX_PARAGRAPH_WORDS} words", text))
        for sentence in sentences:
            found += [Finding(line, rule, sentence) for rule, pattern in _PATTERNS.items() if pattern.search(sentence)]
            if len(_WORD.findall(sentence)) > MAX_WORDS:
                found.append(Finding(line, f"more than {MAX_WORDS} words", sentence))
    return found


def allowance() -> dict[str, int]:
    """The findings that each file may have."""
    return json.loads(ALLOWANCE.read_text()) if ALLOWANCE.exists() else {}


def counts() -> dict[str, int]:
    """The number of findings of each file of the tree that has any."""
    found = {str(path.relative_to(ROOT)): len(findings(path)) for path in _tracked()}
    return {name: number for name, number in found.items() if number}


def genitives(path: Path) -> list[Finding]:
    """Genitive chains, "beside", comments that begin with a preposition, and names that begin with `of_`."""
    found = []
    for line, _, sentences in _texts(path):
        for sentence in sentences:
            words = [word.lower() for word in _WORD.findall(sentence)]
            found += [Finding(line, "of ... of", sentence)] * (words.count("of") > 1)
            found += [Finding(line, "beside", sentence)] * words.count("beside")
    if path.suffix == ".py":
        source = path.read_text("utf-8")
        texts = [(line, text) for line, text, _ in _comments(source)]
        found += [Finding(line, "begins with a preposition", text) for line, text in texts if _PREPOSITION.match(text)]
        names = [
            (getattr(node, "lineno", 0), name) for node in ast.walk(ast.parse(source)) if (name := _bound_name(node))
        ]
        found += [Finding(line, "of_ name", name) for line, name in names if name.lstrip("_").startswith("of_")]
    return found


def genitive_rates() -> dict[str, dict[str, int]]:
    """The genitive measures of each top-level package, rounded up.

    Two are counts: "beside" and `of_` names. The others are rates: "of" in 10,000 words, chains in 1,000 sentences,
    comments that begin with a preposition in 1,000 comments.
    """
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for path in _tracked():
        if len(path.relative_to(ROOT).parts) == 1:
            continue
        package = sums[path.relative_to(ROOT).parts[0]]
        package.update(finding.rule for finding in genitives(path))
        for sentence in (sentence for *_, sentences in _texts(path) for sentence in sentences):
            words = [word.lower() for word in _WORD.findall(sentence)]
            package.update(words=len(words), of=words.count("of"), sentences=bool(words))
        if path.suffix == ".py":
            package["comments"] += len(_comments(path.read_text("utf-8")))
    return {name: _rates(counted) for name, counted in sums.items()}


def _rates(counted: Counter[str]) -> dict[str, int]:
    def in_1000(part: str, whole: str, times: int = 1) -> int:
        return math.ceil(1000 * times * counted[part] / max(counted[whole], 1))

    return {
        "of, in 10,000 words": in_1000("of", "words", 10),
        "of ... of, in 1,000 sentences": in_1000("of ... of", "sentences"),
        "begins with a preposition, in 1,000 comments": in_1000("begins with a preposition", "comments"),
        "beside": counted["beside"],
        "of_ name": counted["of_ name"],
    }


def genitive_allowance() -> dict[str, dict[str, int]]:
    """The highest genitive measures that each package may have."""
    return json.loads(GENITIVES.read_text()) if GENITIVES.exists() else {}


def _bound_name(node: ast.AST) -> str:
    """The name that a node binds, or an empty text."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    return node.arg if isinstance(node, ast.arg) else ""


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split() if not name.startswith("tests/data/")]
    return [path for path in paths if path.exists()]


@functools.cache
def _texts(path: Path) -> list[tuple[int, str, list[str]]]:
    """The line, the text and the sentences of each paragraph, docstring and comment."""
    texts = (_markdown if path.suffix == ".md" else _python)(path.read_text("utf-8"))
    return [(line, text, list(_sentences(text))) for line, text in texts]


def _python(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_docstring and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), _INDENTED.sub("", text)
    block: list[str] = []
    start = 0
    for line, comment, is_whole_line in _comments(source):
        if block and not (is_whole_line and line == start + len(block)):
            yield start, " ".join(block)
            block = []
        start = start if block else line
        block.append(comment)
    if block:
        yield start, " ".join(block)


@functools.cache
def _comments(source: str) -> list[tuple[int, str, bool]]:
    """The line and text of each comment, and whether it has the line for itself."""
    tokens = tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
    return [
        (token.start[0], token.string.lstrip("#").strip(), token.line.lstrip().startswith("#"))
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# type", "# noqa", "# fmt"))
    ]


def _markdown(source: str) -> Iterator[tuple[int, str]]:
    source = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), source, flags=re.DOTALL)
    line = 1
    for paragraph in re.split(r"\n\s*\n", source):
        if not re.match(r"\s*(\||#|    )", paragraph):
            yield line, paragraph if "\n- " in paragraph else _ITEM.sub("", paragraph)
        line += paragraph.count("\n") + 2


def _sentences(text: str) -> Iterator[str]:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", text))
    return (" ".join(part.split()) for part in _END.split(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="write the allowance of each file")
    args = parser.parse_args()
    files = [file for path in args.paths for file in ([path] if path.is_file() else sorted(path.rglob("*.[pm][yd]")))]
    for file in files:
        for line, rule, text in findings(file) + genitives(file):
            print(f"{file}:{line} ({rule}): {' '.join(text.split())[:240]}")
    if not files:
        found = counts()
        if args.write:
            ALLOWANCE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            lower = {
                name: _lower(rates, genitive_allowance().get(name, {})) for name, rates in genitive_rates().items()
            }
            GENITIVES.write_text(json.dumps(lower, indent=1, sort_keys=True) + "\n")
        allowed = allowance()
        for name in sorted(found.keys() | allowed.keys()):
            print(f"{found.get(name, 0):5d} of {allowed.get(name, 0)} allowed: {name}")
        print(f"{sum(found.values()):5d} of {sum(allowed.values())} allowed in all")
        for name, rates in genitive_rates().items():
            print(
                name,
                {rule: f"{rate} of {genitive_allowance().get(name, {}).get(rule, 0)}" for rule, rate in rates.items()},
            )


def _lower(rates: dict[str, int], allowed: dict[str, int]) -> dict[str, int]:
    """The allowance after a fall: never higher than before, a twentieth above the measure, at least ENOUGH."""
    least = {rule: max(rate + rate // 20, ENOUGH.get(rule, 0)) for rule, rate in rates.items()}
    return {rule: min(limit, allowed.get(rule, limit)) for rule, limit in least.items()}


if __name__ == "__main__":
    main()
