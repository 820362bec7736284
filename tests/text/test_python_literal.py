"""Arguments that models write as literals of Python or of JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.tool_calls import python_literal
from runtime.text.tool_calls.python_literal import PythonLiteral


def json_of(text: str, size: int | None = None) -> str:
    """The JSON of a literal that arrives in pieces of `size` characters, or whole if `size` is None."""
    literal, whole = PythonLiteral(), text + ")"
    ends = [literal.end(whole[:at], False) for at in range(0, len(whole) + 1, size or len(whole))]
    end = literal.end(whole, False) if ends[-1] is None else ends[-1]
    assert end == len(text)
    return literal.json(text, frozenset())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.integers(1, 4))
def test_python_and_json_literals_give_their_value(value: object, size: int):
    for text in (repr(value), json.dumps(value)):
        assert json.loads(json_of(text, size)) == value
        assert json_of(text) == json_of(text, size)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1, 2.5, (3,), (4), ())", [1, 2.5, [3], 4, []]),
        ("[- 1, +2, 0x1f, 1_000, .5, 1e3]", [-1, 2, 31, 1000, 0.5, 1000.0]),
        ("""'a' "b" 'c'""", "abc"),
        ("'''it's\n''' r'\\d'", "it's\n\\d"),
        ("{'a': 1, 'a': 2, 3: [true, None], }", {"a": 2, "3": [True, None]}),
        *(
            (text, text)
            for text in (
                *("f(1)", "a[0]", "1 + 2", "1<1", "1j", "{1, 2}", "{1: }", "[1 2]", "[,]", "(1)(2)", "--1", "012"),
                *("b'a'", "f'a'", "1e999", "nan", "'\\x'", "{[]: 1}", "'a' 1", "lambda: 1", "..."),
            )
        ),
    ],
)
def test_only_literals_are_read(text: str, value: object):
    assert json.loads(json_of(text)) == json.loads(json_of(text, 1)) == value


@pytest.mark.parametrize("unit", ["1<", "a[0]", "[", "'a' ", "1,", "{", "-", "(1)"])
def test_long_literal_is_read_once(unit: str, monkeypatch: pytest.MonkeyPatch):
    """Python's own parser takes seconds for some, and sees strings alone."""
    lengths: list[int] = []
    read_string = python_literal.ast.literal_eval
    monkeypatch.setattr(
        python_literal.ast, "literal_eval", lambda text: (lengths.append(len(text)), read_string(text))[1]
    )
    text = f"[{unit * 50_000}"
    literal = PythonLiteral()
    assert literal.end(text, True) is None
    assert json.loads(literal.json(text, frozenset())) == text
    assert sum(lengths) <= len(text)
    assert max(lengths, default=0) < 10


@pytest.mark.parametrize(("text", "value"), [("'a\nb\r'", "a\nb\r"), ("'a\0b'", "a\0b")])
def test_values_that_python_refuses_are_read(text: str, value: object):
    """Models write lines within simple quotes."""
    literal = PythonLiteral()
    assert literal.end(text + ")", final=False) == len(text)
    assert json.loads(literal.json(text, frozenset())) == value
