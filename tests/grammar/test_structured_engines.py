"""Both engines behind one interface, the compiler's children, and the languages of patterns and numbers."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime.base.types import CallboardError, GrammarSpec
from runtime.child import Child, ChildPool, Overrun
from runtime.structured.compiler import GrammarCompiler
from runtime.structured.grammar import compiled
from runtime.structured.matching.automaton import EagerMatcher, build
from runtime.structured.matching.automaton_policy import AutomatonPolicy
from runtime.structured.matching.factory import MatcherFactory
from runtime.structured.matching.matcher import Matcher
from runtime.structured.pattern import GrammarError
from runtime.structured.schema.writer import numbers
from runtime.text.vocabulary import BYTES
from tests.support.structured.cases import BYTE_ENGINE, fits, regex

EOS = BYTES.eos_ids[0]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


def matchers(pattern: str) -> list[Matcher]:
    grammar = regex(pattern)
    return [BYTE_ENGINE.matcher(grammar.lark), EagerMatcher(build(grammar.expression, BYTES))]


def next_of(matcher: Matcher) -> set[int]:
    mask = np.zeros(BYTES.num_words, np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


# ---- matchers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [0, 1])
def test_the_end_of_an_output(engine: int):
    matcher = matchers("ab?")[engine]
    assert not matcher.is_accepting
    assert next_of(matcher) == {ord("a")}
    assert matcher.allowed([EOS]) == 0
    matcher.advance(b"a")
    assert matcher.is_accepting
    assert not matcher.is_finished
    assert next_of(matcher) == {ord("b"), EOS}
    assert matcher.allowed([EOS, EOS]) == 2  # a step in flight may take one more
    assert matcher.allowed([EOS, ord("b")]) == 1
    matcher.advance([EOS])
    assert matcher.is_finished
    assert next_of(matcher) == {EOS}
    matcher.rollback(1)
    assert next_of(matcher) == {ord("b"), EOS}
    matcher.advance([ord("b"), EOS])
    matcher.rollback(2)
    assert next_of(matcher) == {ord("b"), EOS}
    matcher.advance(b"b")
    assert matcher.is_finished
    assert next_of(matcher) == {EOS}
    matcher.rollback(2)
    assert next_of(matcher) == {ord("a")}


@pytest.mark.parametrize("engine", [0, 1])
def test_guesses_are_checked_without_taking_them(engine: int):
    matcher = matchers("x[0-9]{2}y")[engine]
    masks = np.zeros((6, BYTES.num_words), np.int32)
    assert matcher.fill_ahead(masks, b"x12zy") == 3
    assert matcher.fill_ahead(masks[:1], b"") == 0
    twin = matchers("x[0-9]{2}y")[engine]
    for mask, token in zip(masks[:4], b"x12y", strict=True):
        want = np.zeros(BYTES.num_words, np.int32)
        twin.fill(want)
        assert (mask == want).all()
        twin.advance([token])
    assert not masks[4:].any()
    assert matcher.allowed(b"x12y") == 4
    assert matcher.fill_ahead(masks[:5], [*b"x12y"]) == 4
    with pytest.raises(CallboardError, match="token 122"):
        matcher.advance(b"xz")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("abx0"), max_size=6), st.data())
def test_rollback_undoes_advance(text: list[str], data: st.DataObject):
    for matcher in matchers("(?:ab|a[x0]*|b+)*"):
        taken = matcher.allowed("".join(text).encode())
        before = [next_of(matcher)]
        for char in text[:taken]:
            matcher.advance(char.encode())
            before.append(next_of(matcher))
        for num in range(taken):
            matcher.rollback(1)
            assert next_of(matcher) == before[taken - num - 1]


def test_a_grammar_that_cannot_go_on_says_so():
    with pytest.raises(CallboardError, match="too complex to go on here"):
        BYTE_ENGINE.matcher("start: /(/")


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_grammar_in_use_moves_to_the_eager_engine():
    grammar = compiled(GrammarSpec("json", json.dumps(PERSON)))
    engines = MatcherFactory(BYTES, AutomatonPolicy(1000.0, len(BYTES.tokens)), max_entries=2)
    pays = engines.policy.expected_s(grammar.expression)
    try:
        first = engines.matcher(grammar)
        engines.spent(grammar, pays / 2)
        assert first.engine == engines.matcher(grammar).engine == "lazy"
        assert not engines._entries[grammar.key].is_tried
        engines.spent(grammar, pays / 2)
        assert engines.matcher(grammar).engine == "lazy"  # it is being built meanwhile
        engines._builder.submit(str).result(60)  # after what was submitted before
        matcher = engines.matcher(grammar)
        assert engines.policy.expected_s(grammar.expression) != pays  # it has learned
        assert isinstance(matcher, EagerMatcher)
        text = b'{"name": "a", "age": 3}'
        assert matcher.allowed(text) == first.allowed(text) == len(text)
        for text in ("x", "y"):
            engines.matcher(regex(text))
        assert engines.matcher(grammar).engine == "lazy"  # it was the one used longest ago
        large = regex("[a-z]{1,9000}")
        engines.matcher(large)
        engines.spent(large, 10.0)
        engines.matcher(large)
        engines._builder.submit(str).result(60)
        assert engines.matcher(large).engine == "lazy"
    finally:
        engines.close()


def test_threads_share_engines():
    engines = MatcherFactory(BYTES)
    grammars = [regex(f"{i}+") for i in range(4)]

    def use(i: int) -> bool:
        matcher = engines.matcher(grammars[i % 4])
        assert matcher.engine == "lazy"
        matcher.advance(str(i % 4).encode() * 3)
        return matcher.is_accepting and next_of(matcher) == {ord(str(i % 4)), EOS}

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(64)))
    engines.close()


def test_many_masks_at_once_are_those_of_each():
    """Of matchers in all kinds of states; the one that has come to a limit is the only one to fail."""
    outputs = [("[a-c]{1,9}x", b"ab"), ("ab?", b"a"), ("ab?", bytes([ord("a")])), ("[a-z]*", b""), ("(?:ab)+", b"aba")]
    cases = [BYTE_ENGINE.matcher(regex(pattern).lark) for pattern, _ in outputs * 9]
    for matcher, (_, text) in zip(cases, outputs * 9, strict=True):
        matcher.advance(text)
    cases[2].advance([EOS])
    broken = cases[7].copy()
    broken.inner.consume_tokens([ord("!")])
    cases.append(broken)
    numbers = np.random.default_rng(0).permutation(len(cases) + 3)[: len(cases)].tolist()
    masks = np.full((len(cases) + 3, BYTES.num_words), 7, np.int32)
    errors = BYTE_ENGINE.fill(cases, masks, numbers)
    assert [error is not None for error in errors] == [False] * 45 + [True]
    for matcher, number in zip(cases[:-1], numbers, strict=False):
        alone = np.zeros(BYTES.num_words, np.int32)
        matcher.fill(alone)
        assert masks[number].tolist() == alone.tolist()
    assert (masks[sorted({*range(len(masks))} - {*numbers})] == 7).all()


# ---- children --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_child_is_killed_for_time_and_memory():
    child = Child(1 << 30)
    assert child.run(30.0, os.path.basename, "a/b") == "b"
    with pytest.raises(GrammarError, match="open"):
        child.run(30.0, compiled, GrammarSpec("regex", "("))
    assert child.is_alive
    with pytest.raises(Overrun, match=r"over 0\.2 s"):
        child.run(0.2, time.sleep, 60)
    assert not child.is_alive
    child = Child(1 << 30)
    with pytest.raises(Overrun, match="memory"):
        child.run(30.0, partial(bytes, 4 << 30))
    child.kill()


@pytest.mark.long
def test_a_pool_survives_lost_children():
    pool = ChildPool(1, 1 << 30, 0, os.getpid)
    try:
        killed = pool.run(30.0, os.getpid)
        os.kill(killed, signal.SIGKILL)
        os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
        assert pool.run(30.0, os.getpid) != killed
    finally:
        pool.close()
    no_start = ChildPool(1, 1 << 30, 0, bytes, 4 << 30)  # more than it may have
    for _ in range(2):
        with pytest.raises(Overrun, match="no process to run in"):
            no_start.run(30.0, os.getpid)
    no_start.close()


def test_pool_starts_children_once_there_are_threads_again(monkeypatch):
    pool = ChildPool(2, 1 << 30, 0, os.getpid)
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(3):
            with pytest.raises(Overrun, match="no process to run in"):
                pool.run(30.0, os.getpid)
    started = Mock()
    monkeypatch.setattr(threading.Thread, "start", started)
    pool.start()
    assert started.call_count == 1


@pytest.mark.long
async def test_a_bomb_delays_nobody_and_answers_are_kept():
    compiler = GrammarCompiler(deadline_s=1.5)
    try:
        await compiler.compile(GrammarSpec("regex", "warm"))
        names = {f"^a{i}.*(x|y){{1,50}}z": {} for i in range(250)}
        bombs = [GrammarSpec("json", json.dumps({"patternProperties": names, "maxProperties": n})) for n in (1, 2)]
        waiting = [asyncio.create_task(compiler.compile(bomb)) for bomb in (*bombs, bombs[0])]
        await asyncio.sleep(0.1)
        assert len(compiler._open) == 2
        grammar = await asyncio.wait_for(compiler.compile(GrammarSpec("json", json.dumps(PERSON))), 20)
        assert fits(grammar, '{"name":"a"}')
        for task in waiting:
            with pytest.raises(GrammarError, match=r"over 1\.5 s"):
                await task
        assert await compiler.compile(GrammarSpec("json", json.dumps(PERSON))) is grammar
        assert (await compiler.compile(GrammarSpec("regex", "after"))).lark
    finally:
        compiler.close()


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


CHAIN = {**{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}, "3000": {}}
BOMBS = [
    (GrammarSpec("json", nested(1000)), "nested deeper than the limit of 64"),
    (GrammarSpec("json", nested(10_000)), "nested deeper"),
    (GrammarSpec("json", '{"properties":{"a":{"$ref":"#"}},"required":["a"]}'), "no text fits"),
    (GrammarSpec("json", '{"allOf":[{"$ref":"#"}]}'), "leads to itself"),
    (GrammarSpec("json", json.dumps({"properties": {f"p{i}": {} for i in range(10_000)}})), "limit is 1000"),
    (GrammarSpec("json", '{"$ref":"https://example.com/s.json"}'), "within the schema"),
    (GrammarSpec("json", json.dumps({"enum": ["x" * 1000] * 1000})), "limit is 262144 bytes"),
    (GrammarSpec("json", '{"type":"integer","minimum":5,"maximum":4}'), "no text fits"),
    (GrammarSpec("json", '{"type":"string","pattern":"^(a+)+$","not":{}}'), '"not"'),
    (GrammarSpec("json", json.dumps({"$defs": CHAIN, "$ref": "#/$defs/0"})), "references"),
    (GrammarSpec("regex", "x{1,100000}"), "limit is 10000 repetitions"),
    (GrammarSpec("regex", "(?<=a)b"), "looks ahead or behind"),
    (GrammarSpec("regex", "((a{1,100}){1,100}){1,100}"), "limit is 50000 states"),
    (GrammarSpec("regex", "(" * 100_000), "limit of 60"),
    (GrammarSpec("choice", json.dumps(["x" * 1000] * 200 + ["y" * 60_000])), "limit is 50000"),
    (GrammarSpec("regex", "(a+)+b"), ""),
    (GrammarSpec("regex", "(a|aa){50}"), ""),
    (GrammarSpec("regex", "(x+x+)+y"), ""),
    (GrammarSpec("regex", "(a|b)*a(a|b){2000}"), ""),
    (GrammarSpec("regex", ".{0,10000}"), ""),
]  # fmt: skip


@pytest.mark.long
async def test_bombs_end_in_time():
    compiler = GrammarCompiler(deadline_s=5.0)
    try:
        await compiler.compile(GrammarSpec("regex", "warm"))
        for spec, says in BOMBS:
            if says:
                with pytest.raises(GrammarError, match=re.escape(says)):
                    await compiler.compile(spec)
            else:
                grammar = await compiler.compile(spec)
                next_of(BYTE_ENGINE.matcher(grammar.lark))
    finally:
        compiler.close()


# ---- numbers and patterns --------------------------------------------------------------------------------------------

_INTEGERS = st.none() | st.integers(-3000, 3000)
_DECIMALS = st.none() | st.decimals(-30, 30, places=2)


def python_pattern(expression: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\x\{(\w+)\}", lambda m: f"\\x{int(m[1], 16):02x}", expression))


@given(_INTEGERS, _INTEGERS, st.lists(st.integers(-4000, 4000), min_size=5))
def test_ranges_of_integers(low: int | None, high: int | None, values: list[int]):
    expression = numbers.integers(low, high)
    for value in (*values, *(end + d for end in (low, high, 0) if end is not None for d in (-1, 0, 1))):
        inside = (low is None or value >= low) and (high is None or value <= high)
        assert inside == bool(expression and python_pattern(expression).fullmatch(str(value)))


@given(_DECIMALS, _DECIMALS, st.booleans(), st.booleans(), st.lists(st.decimals(-40, 40, places=3), min_size=5))
def test_ranges_of_decimals(low: Decimal | None, high: Decimal | None, open_low: bool, open_high: bool, values: list):
    expression = numbers.decimals(low, high, open_low, open_high)
    ends = [
        end + d for end in (low, high, Decimal(0)) if end is not None for d in (0, Decimal("0.001"), -Decimal("0.001"))
    ]
    for value in (*values, *ends):
        assume(not (value == 0 and value.is_signed()))
        inside = (low is None or (value > low if open_low else value >= low)) and (
            high is None or (value < high if open_high else value <= high)
        )
        for text in {f"{value:f}", f"{value:f}0" if "." in f"{value:f}" else f"{value:f}.0"}:
            assert inside == bool(expression and python_pattern(expression).fullmatch(text)), text


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("(a|aa){50}", ["a" * 50, "a" * 100], ["a" * 49, "a" * 101]),
        ("(a+)+b", ["b".rjust(30, "a")], ["a" * 30]),
        ("^ab$|c", ["ab", "c"], ["abc", ""]),
        ("(?<y>[0-9]{2})(?P<m>-1)?", ["24", "24-1"], ["2"]),
        ("\\u{1F600}\\x41\\0", ["😀A\0"], ["😀A"]),
        ("[^\\w]", ["-"], ["a", "é"]),
        ("", [""], ["a"]),
        ("a{2}{3}", ["a" * 6], ["a" * 5]),
        ("x{,3}", ["x{,3}"], ["xx"]),
    ],
)
def test_patterns_of_whole_outputs(pattern: str, yes: list[str], no: list[str]):
    grammar = regex(pattern)
    assert [fits(grammar, text) for text in (*yes, *no)] == [True] * len(yes) + [False] * len(no)


_ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "\\d", "\\n", "é"])
_PATTERNS = st.recursive(
    _ATOMS,
    lambda p: (
        st.lists(p, max_size=3).map("".join)
        | st.lists(p, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})")
        | st.tuples(p, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(_PATTERNS, st.lists(st.text("ab1é\n", max_size=5), min_size=8, max_size=8))
def test_patterns_mean_what_pythons_mean(pattern: str, texts: list[str]):
    grammar = regex(pattern)
    schema = compiled(GrammarSpec("json", json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"})))
    for text in texts:
        want = bool(re.fullmatch(pattern, text))
        assert fits(grammar, text) == want
        assert fits(schema, json.dumps(text, ensure_ascii=False)) == want
