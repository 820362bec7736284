"""Grammars in EBNF and in Lark's form, and structural tags: accepted texts, and errors of refused grammars."""

import json

import pytest

from runtime.base.types import Grammar, GrammarSpec
from runtime.structured.grammar import compiled
from runtime.structured.pattern import GrammarError
from runtime.structured.readers.lark import in_json_string, read_lark
from tests.support.structured.cases import fits

# From llama.cpp's grammars/, as they are.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
# From Lark's documentation.
CALCULATOR = r"""
    ?start: sum
          | NAME "=" sum    -> assign_var
    ?sum: product
        | sum "+" product   -> add
        | sum "-" product   -> sub
    ?product: atom
        | product "*" atom  -> mul
        | product "/" atom  -> div
    ?atom: NUMBER           -> number
         | "-" atom         -> neg
         | NAME             -> var
         | "(" sum ")"
    %import common.CNAME -> NAME
    %import common.NUMBER
    %import common.WS_INLINE
    %ignore WS_INLINE
"""
TEXTS: list[tuple[str, list[str], list[str]]] = [
    (
        JSON,
        ['{"a": [1, 2.5e3, {"b":"c\\n"}, true ]}', "{}", '{"é" :1}', '{ "a":\n\t[[],[ -0.5]]\n}'],
        ["", "[]", '{"a":tru}', '{"a":1', '{"a" 1}', '{"a":01}'],
    ),
    # White space after a number is any, and then a line has to end: a terminal of all white space would take that end.
    (ARITHMETIC, ["a=1\n", "a1 +(2*b)\n=3 \n\nx=y\n"], ["a=1", "a=\n", "=1\n", "a==1\n"]),
    (CALCULATOR, ["a = 1+2 * (b - -3)", "1.5e3 ", "_x1/2"], ["", "1+", "a=b=c", "(1", "1 2"]),
    ('root ::= word "end"\nword ::= [a-z]+', ["xend", "endend"], ["end", "ende", "xen"]),
    ('root ::= "a" "bc" x | "ab" "d" x\nx ::= "(" x ")" | ""', ["abc", "abd()"], ["abcd", "ab", "abbc"]),
    ("root ::= list\nlist ::= item | list [,;] item\nitem ::= [^,;]+", ["a", "a,é;b c"], ["", "a,", ",a"]),
    ("root ::= [a-c]{2} [^a-c]{1,2} .?", ["abd", "ccdé\n"], ["ad", "abab", "abdddd"]),
    ('root ::= "\\x41\\u00e9\\U0001F600\\"\\t" [\\]\\U0001F600-]', ['Aé😀"\t]', 'Aé😀"\t-'], ['Aé😀"\t[']),
    ('start: "Go"i (WS "no"~2..3)? [END]\nEND: /st(op)+/i\n%import common (WS)', ["gO", "GO nonoSTOPop"], ["go no"]),
    ('start: _open "a".."c" | start start // two\n_open.2: "("', ["(a", "(b(c"], ["a", "(d", ""]),
]  # fmt: skip


def of_grammar(text: str) -> Grammar:
    return compiled(GrammarSpec("grammar", text))


@pytest.mark.parametrize(("grammar", "texts", "others"), TEXTS)
def test_texts_of_a_grammar(grammar: str, texts: list[str], others: list[str]):
    found = of_grammar(grammar)
    assert [text for text in texts if not fits(found, text)] == []
    assert [text for text in others if fits(found, text)] == []


def test_a_grammar_without_recursion_is_one_expression_too():
    assert of_grammar('root ::= x "!"\nx ::= "a" x | "b" y\ny ::= [c]*').expression
    assert not of_grammar('root ::= "(" root ")" | ""').expression


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('root ::= "a"\n  | b', r'refers to "b", which is not defined, at line 2, column 5'),
        ('a ::= "b"', "has no rule 'root'"),
        ('a: "b"', "cannot be read: no start rule found"),
        ('root ::= "a"\nroot ::= "b"', 'defines "root" again at line 2, column 1'),
        ('root ::= ("a"', r"ends where '\)' should be at line 1, column 14"),
        ('root ::= "a" ) "b"', "where the next rule should begin at line 1, column 14"),
        ("root ::= [z-a]", "a range in brackets that is none, at line 1, column 10"),
        ('root ::= "\\q"', "wrong escape .* at line 1, column 10"),
        ('root ::= "\\uD800"', "wrong escape"),
        ('root ::= "a"{5,2}', "repeats at least 5 and at most 2 times"),
        ('root ::= "a"{99999}', "repeats 99999 times, over the limit of 10000,"),
        ("root ::= " + "(" * 70, "deeper than the limit of 60"),
        ('root ::= a\na ::= "x" a', "cannot be satisfied"),
        ('root ::= (= "a") "b"', "not understood, at line 1, column 11"),
        ("start: /a(?=b)/", "cannot be read at line 1, column 8: invalid regex"),
        ("start: x", 'cannot be read at line 1, column 8: unknown name: "x"'),
        ('start[lazy]: "a"', r"the attribute lazy; a rule may have capture and max_tokens, at line 1, column 7"),
        ('start[capture, stop="b"]: /a+/', "the attribute stop; a rule may have capture"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "not understood, at line 1, column 13"),
        ("%declare A\nstart: A", "has %declare, which is not supported,"),
        ("%import python.NAME\nstart: NAME", "only common is supported"),
        ("start: <|eot|>", "not understood"),
        ("root ::= " + '"a" ' * 90_000, "the limit is 262144 bytes"),
    ],
)
def test_a_bad_grammar(grammar: str, says: str):
    with pytest.raises(GrammarError, match=says):
        of_grammar(grammar)


def test_too_many_rules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.structured.readers.ebnf.MAX_RULES", 2)
    with pytest.raises(GrammarError, match="over 2 rules, the limit"):
        of_grammar('root ::= a\na ::= "b"\nb ::= "c"')


def test_a_recursive_grammar_follows_reasoning():
    """A recursion to the start is one to the structure, not to the free text before it."""
    found = compiled(GrammarSpec("grammar", 'root ::= "(" root ")" | "x"', after="</think>"))
    assert fits(found, "hm</think>((x))")
    assert not fits(found, "hm</think>(hm</think>x)")


def test_ignored_texts_stay_within_a_lark_grammar():
    found = compiled(GrammarSpec("grammar", 'start: "a" "b"\n%ignore " "', after="</think>"))
    assert fits(found, "</think>\na  b")
    assert not fits(found, "</ think>ab")


def test_priorities_of_lark_change_no_text():
    found = of_grammar('start: A | !b\nA.2: "a"\n!b.10: "b"')
    assert fits(found, "a")
    assert fits(found, "b")


def test_a_lark_grammar_as_guidance_writes_it():
    """A name of a capture changes no text, and llguidance counts a rule's tokens."""
    found = of_grammar('%llguidance {}\n\nstart: "A" a b\na[capture="__LIST_APPEND:x"]: X\nX: "x"\n'
                       'b[capture, max_tokens=2]: /[0-9]+/\n')  # fmt: skip
    assert fits(found, "Ax12")
    assert not fits(found, "Ax123")  # each character is a token
    assert not fits(found, "A12")


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('start: "a\\n" X\nX: "\\""', ['a\\n\\"'], ['a\n"']),
        ('start: "go"i "a".."c" /[^x]/', ["GOb\\n", "goaé"], ["gob\n", "gobx", "gobX\n"]),
        (
            "%import common (INT, WS)\n%import common.CNAME -> N\nstart: N INT\n%ignore WS",
            ["x_1 \\n 2", "a 1"],
            ["x\n1"],
        ),
    ],
)
def test_a_lark_grammar_within_a_json_string(grammar: str, texts: list[str], others: list[str]):
    found = of_grammar(in_json_string(read_lark(grammar)))
    assert [text for text in texts if not fits(found, text)] == []
    assert [text for text in others if fits(found, text)] == []


# ---- structural tags -------------------------------------------------------------------------------------------------

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ONE = '<f=x>{"a": 1}</f>'
TWO = "<f=y>qzz</f>"
TAGS = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [
        {"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": OBJECT}, "end": "</f>"},
        {"begin": "<f=y>", "content": {"type": "regex", "pattern": "[a-z]+"}, "end": "zz</f>"},
    ],
}
PARTS = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "A:"},
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
        {
            "type": "or",
            "elements": [
                {"type": "regex", "pattern": "x+"},
                {"type": "grammar", "grammar": 'root ::= "(" root ")" | "y"'},
            ],
        },
    ],
}  # fmt: skip
NAMES = {"begin": "[", "content": {"type": "grammar", "grammar": "root ::= [a-z\\]]+"}, "end": "]"}


def const(value: str) -> dict:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict:
    return {"type": "regex", "pattern": pattern}


def elements(*some: dict) -> dict:
    return {"type": "sequence", "elements": [*some]}


def either(*some: dict) -> dict:
    return {"type": "or", "elements": [*some]}


FORMATS: list[tuple[dict, list[str], list[str]]] = [
    (TAGS, ["", "a <", f"a {ONE} b {TWO}", f"{TWO}{ONE}"], ["<f", "<f=z>", "<f=x>{}</f>", ONE[:-1], f"a{TWO[:-1]}"]),
    ({**TAGS, "at_least_one": True}, [TWO, f"{ONE} b"], ["", "b", f"b{ONE}"]),
    ({**TAGS, "stop_after_first": True}, ["", "a", f"a {TWO}"], [f"{TWO} "]),
    ({**TAGS, "triggers": ["<f=x", "<f=y"]}, ["<f", "<f=z>", f"{ONE}{TWO}"], ["<f=x"]),
    (PARTS, ["A:<t>hi <b></t>xx", "A:<t></t>((y))"], ["A:<t>", "A:<t></t>((y)", "<t></t>x"]),
    ({"type": "tags_with_separator", "separator": ", ", "tags": [NAMES]}, ["", "[a], [b]]"], ["[a],[b]", "[]"]),
    (elements(regex("[a-z]+"), const("end")), ["xend", "endend"], ["end", "x"]),
    (elements(const("a"), regex("b*"), const("b")), ["ab", "abbb"], ["a"]),
    (elements(either(const("a"), const("ab")), const("bc")), ["abc", "abbc"], ["ab"]),
    (elements(either(const("x"), elements(const("x"), regex("y+"))), const("yz")), ["xyz", "xyyz"], ["xz"]),
    (elements(regex("(a|ab)"), regex("(c|bcd)"), const("d")), ["abcdd", "acd", "abcd"], ["ad"]),
    ({"type": "tag", "begin": "<", "content": elements(regex("[a-z]+"), regex("x+")), "end": ">"}, ["<axx>"], ["<x>"]),
]


@pytest.mark.parametrize(("form", "texts", "others"), FORMATS)
def test_texts_of_tags(form: dict, texts: list[str], others: list[str]):
    found = compiled(GrammarSpec("tags", json.dumps(form)))
    assert [text for text in texts if not fits(found, text)] == []
    assert [text for text in others if fits(found, text)] == []


def test_tags_after_reasoning():
    found = compiled(GrammarSpec("tags", json.dumps(TAGS), after="</think>"))
    assert fits(found, f"<f=z></think>\n\nso {ONE}")
    assert not fits(found, f"{ONE}")
    assert not fits(found, "</think><f=z>")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "q"}, "Invalid value 'q'"),
        ({"type": "tag", "begin": "x"}, "missing required field `content`"),
        ({**TAGS, "excludes": []}, "excludes"),
        ({**TAGS, "triggers": [""]}, "no triggers or an empty one"),
        ({**TAGS, "triggers": ["<f=x"]}, "/tags/1, which begins with no trigger"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, 'at / that at # has the keyword "not"'),
        ({"type": "or", "elements": [{"type": "grammar", "grammar": "root ::= x"}]}, '/elements/0 that refers to "x"'),
        ({"type": "sequence", "elements": [{"type": "any_text"}] * 2}, "only as the last"),
        ({"type": "tag", "begin": "", "content": TAGS, "end": "x"}, "within a tag"),
    ],
)
def test_bad_tags(form: dict, says: str):
    with pytest.raises(GrammarError, match=says):
        compiled(GrammarSpec("tags", json.dumps(form)))
