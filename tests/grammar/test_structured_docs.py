"""docs/structured-output.md equals the text below; `python -m tests.grammar.test_structured_docs` writes it."""

from pathlib import Path

from runtime.structured import pattern, rules, tags
from runtime.structured.grammar import MAX_BYTES
from runtime.structured.schema import keywords
from runtime.structured.schema import writer as schema
from runtime.structured.schema.formats import FORMATS
from tests.support.structured.corpus import CASES, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "structured-output.md"
_NOTES = {
    "$ref": "within the schema: a pointer (`#/…`) or an `$anchor`, also after the root's `$id`; any recursion",
    "additionalItems": "after a list of `items` (draft 7 and before)",
    "additionalProperties": "missing beside `properties` (also empty ones) or `patternProperties`, it means false",
    "allOf": "merged",
    "anyOf": "with what stands beside it",
    "const": "as an `enum` of one",
    "dependencies": "as `dependentRequired` and `dependentSchemas`",
    "enum": "those values that fit what stands beside it, written as they are",
    "exclusiveMaximum": "or true beside `maximum` (draft 4)",
    "exclusiveMinimum": "or true beside `minimum` (draft 4)",
    "format": ", ".join(f"`{name}`" for name in FORMATS) + "; also `int32` and the like",
    "items": "a list is a tuple (draft 7 and before)",
    "minimum": "from 1e-9 to 1e17, or 0; a bounded number is written without an exponent",
    "minProperties": "up to the number of required properties, to 1, or where all names are listed",
    "multipleOf": "exactly, in decimals: whole numbers to 10,000, and fractions like 0.01, 0.25, 2.5 that divide 10ⁿ",
    "nullable": "with `type`: null as well (OpenAPI)",
    "oneOf": "where types, enums or properties of objects exclude a value of two options, or can be made to",
    "pattern": "ECMA-262; lookaheads only after its `^`; no back-references, `\\b`, `\\p` or flags; `^`, `$` at ends",
    "patternProperties": "a free name matches just one pattern",
    "properties": "in the order of the schema",
    "propertyNames": "an `enum`, or what strings may have",
    "required": "names that are not listed come after those that are",
    "type": "where it is missing and all other keywords are about one type, that type",
    "unevaluatedItems": "where there is no `anyOf` or `oneOf` beside it",
    "unevaluatedProperties": "where there is no `anyOf` or `oneOf` beside it",
    "uniqueItems": "where the items have an `enum`, or there is one at most; otherwise see below",
}
_LIMITS = {
    "bytes of the schema, the expression, the choices or the grammar": MAX_BYTES,
    "nesting of the schema": keywords.MAX_DEPTH,
    "properties in all": keywords.MAX_PROPERTIES,
    "bytes of one `enum`": keywords.MAX_ENUM_BYTES,
    "repetitions (`minLength`, `maxItems`, `{n,m}` …)": pattern.MAX_REPEAT,
    "states of a pattern with its repetitions written out": pattern.MAX_STATES,
    "nested groups of a pattern": pattern.MAX_NESTING,
    "rules of a grammar": schema.MAX_RULES,
    "bytes of what the schema or the grammar is compiled to": rules.MAX_LARK_BYTES,
    "formats within formats of structural tags": tags.MAX_NESTED,
    "seconds to compile": 5,
}
_HEAD = """# Structured output

<!-- Written by tests/grammar/test_structured_docs.py from the code; change that. -->

An answer can follow a JSON Schema, a regular expression, a choice of texts or a grammar, in whole or in regions. It
then fits at any temperature. An answer that reaches `max_tokens` is cut off, with the finish reason `length`.

A request with something that cannot be enforced gets a 400 that names the keyword or the limit. Tokens that do not fit
are excluded first; penalties, temperature and filters apply to the rest. `min_tokens` excludes no token that is the
only way on. Log-probabilities are the model's own.

| field | value |
| --- | --- |
| `response_format` | `{"type": "json_schema", "json_schema": {"name": …, "schema": …}}`, OpenAI's |
| `response_format` | `{"type": "json_schema", "schema": …}` |
| `response_format` | `{"type": "json_object"}`, `{"type": "regex", "regex": …}` |
| `response_format` | `{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": […]}` |
| `response_format` | `{"type": "structural_tag", "format": …}`, XGrammar's newer form |
| `structured_outputs` | one of `json`, `regex`, `choice`, `json_object`, `grammar` and `structural_tag`, vLLM's |
| `ebnf`, `regex`; `grammar`; `guided_grammar` | SGLang's, llama.cpp's and an older name of vLLM's for the same |
| `tools` | `tool_choice` required or a function: arguments fit their schema (without `strict`: if it is supported) |
| `tools` | where the model may choose and a function is `strict`: so does every call that it writes after its mark |
| `tools` | a custom tool with a `format` of the type grammar, Lark's or a regular expression: its text follows it |
| `response_format` and `tools` | the model answers in that JSON, or with calls, bound too (Hermes', DeepSeek's marks) |

White space is at most one space after each comma and colon, and 16 characters after an object or array. In strings, a
character is escaped only where JSON requires it, in the shortest way. Integers have up to 19 digits.

A model that reasons may do so first, also where it opens `<think>` itself; the structure begins after `</think>`. With
reasoning off, it begins at once.

In Python, without a server, the same fields are keywords of `LLM.generate` and `LLM.chat`:

```python
from callboard import LLM, SamplingParams

schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
prompts, params = ["The capital of France as JSON: "], SamplingParams(max_tokens=64)
answers = LLM().generate(prompts, params, structured_outputs={"json": schema})
```

`grammar_of(schema)` and `compiled(GrammarSpec("regex", "[a-z]+"))` of `runtime.structured.grammar` make a grammar for
`SamplingParams.grammar`, where each prompt has its own.

## Grammars

A text with `::=` is EBNF, as llama.cpp (GBNF), XGrammar and SGLang write it, and begins with the rule `root`. Any other
text is Lark's form and begins with `start`. Rules may recurse in any way. An error names the line and the column.

```
root ::= call ("; " call)*
call ::= [a-z]+ "(" (argument (", " argument)*)? ")"
argument ::= [0-9]+ | call
```

**EBNF** describes texts character by character, and each such text can be written. Rules without recursion become
one terminal each. Where a terminal's end depends on the text after it (`[a-z]+ "end"` next to a recursion), it is
read by single characters. Masks for such free text take longer, and too much of it ends with `grammar_failed`.

**Lark** grammars go to llguidance. As in Lark, each terminal takes as much text as it can: after `/[a-z]+/`, the text
`"end"` cannot follow. Regular expressions are Rust's.

`%ignore`, `%import common.NAME`, `"a".."z"`, the flag `i` and a rule's `max_tokens` are supported. Priorities, a rule's
`capture` and an empty `%llguidance {}` are ignored. Lookaheads, tokens (`<|eot|>`), templates and other attributes of
rules, `%declare`, `%json` and other directives are refused. A custom tool's expressions have the syntax of a schema's
`pattern`, because they are rewritten for a JSON string.

## Structural tags

Text is free up to a trigger, which begins a tag. The rest of that tag's `begin`, its content and its `end` follow; then
the text is free again. A trigger that begins no tag cannot be written. In a region, any text that fits can.

The newer form has the formats `triggered_tags`, `tag`, `tags_with_separator`, `sequence`, `or`, `const_string`,
`any_text`, `json_schema`, `regex` and `grammar`. With `at_least_one`, the answer begins with a tag; with
`stop_after_first`, it ends with the first.

Free text is the last part of a sequence, or a tag's content up to the first `end`. A regular expression within a
tag ends at the first place where `end` follows, too.

## JSON Schema (drafts 4 to 2020-12, and OpenAPI's)

| keyword | enforced |
| --- | --- |
"""

_STRICT = """.

With `"strict": true`, everything that asserts something is enforced or refused. With `"strict": false`, a keyword that
cannot be enforced is ignored, and the header `x-callboard-ignored-fields` has its path. Tools without `strict` are read
like this.

Elsewhere, a missing `strict` ignores one keyword: `uniqueItems` of free items. No grammar can enforce it, and a reader
that makes a set (pydantic's `set`) does not need it.

"""

_MEASURED = """
A grammar within these limits may still reach a limit of states within an answer. That answer ends with the error
`grammar_failed` (a 400, or the last event of a stream that has begun). Other answers go on.

## What Callboard does itself, and why

Two packages compute masks: llguidance on the host, for every grammar, and outlines-core, which builds automata for a
GPU. Both could read schemas, too. Callboard keeps a reader of its own where a measurement showed a gain for users.

| part | Where | reads | without it |
| --- | --- | --- | --- |
| JSON Schema | `runtime/structured/schema/` | Callboard | fewer schemas accepted, invalid instances accepted |
| regular expressions | `readers/regex.py` | Callboard | Rust's `\\d`, `.` and `$` for ECMA-262's; no lookaheads |
| EBNF, GBNF | `readers/ebnf.py`, `context_free.py`, `ambiguity.py` | Callboard | valid texts lost in 4 of 33 grammars |
| Lark | `readers/lark.py` | llguidance | - |
| automata | `matching/automaton.py` | outlines-core | slow steps of small models on a GPU: see below |

**JSON Schema.** SchemaStore, 250 of 578 schemas drawn; 250 of Berkeley's 3,245 function-calling schemas; 250 of
JSON-Schema-Test-Suite's 461 groups (draft 2020-12, at 44401e0c). Compiled as with `strict: true` (`python -m
benchmarks.engine.grammar_suite --sample 250 FOLDER ...`, one busy core of an Intel Xeon, family 6, model 167, 2.6 GHz):

| schemas | reader | accepted | compile, ms, p50 / p90 | valid instances taken | invalid instances taken |
| --- | --- | --- | --- | --- | --- |
| SchemaStore | Callboard | 50.4 % | 25 / 107 | | |
| SchemaStore | llguidance | 37.6 % | 1.8 / 17 | | |
| tools | Callboard | 100 % | 1.4 / 2.6 | | |
| tools | llguidance | 100 % | 0.6 / 0.8 | | |
| test suite | Callboard | 69.2 % | 1.6 / 8.9 | 331 | 0 |
| test suite | llguidance | 44.0 % | 0.5 / 0.8 | 318 | 16 |

**EBNF.** The nine examples of llama.cpp and 24 of transformers-CFG, up to 20 random texts of each (`grammar_texts` of
7be48e03, SmolLM2's vocabulary, same machine). Masks of the SMILES grammars were not timed:

| grammars | reader | texts accepted | compile, ms (median, most) | mask, us (median of medians) |
| --- | --- | --- | --- | --- |
| llama.cpp (9) | Callboard | 176 of 176 | 15, 63 | 9 |
| llama.cpp (9) | llguidance | 156 of 176 | 2, 14 | 9 |
| transformers-CFG (20) | Callboard | 367 of 367 | 13, 1,753 | 4 |
| transformers-CFG (20) | llguidance | 367 of 367 | 8, 48 | 5 |
| its SMILES (4) | Callboard | 80 of 80 | 162, 178 | |
| its SMILES (4) | llguidance | 29 of 80 | 13, 15 | |

llguidance's converter makes terminals of rules, and its lexer takes the longest one. `ws ::= [ \\t\\n]*` before `"\\n"`
then takes the newline, and llama.cpp's `arithmetic.gbnf` accepts no complete text.

**Lark.** Callboard had an exact reader of Lark grammars, too, which split ambiguous terminals. Lark's users expect the
longest terminal: an exact reader writes `floatx` for a keyword and a name. Before its removal, with the same texts:

| grammar | own reader: compile, mask (mean) | llguidance: compile, mask (mean) |
| --- | --- | --- |
| C (syncode) | 531 ms, 18 ms; 20 of 39 texts at a limit | 2.3 ms, 0.19 ms |
| Java (syncode) | above 15 s | 9 ms |
| Lark's own | 14.4 s | 1.9 ms |
| RFC index (llguidance) | 2.7 s | 15 ms |

**Left out.** The suites show little loss for references across an `$id` within a schema (1 in SchemaStore's 578), and
for a `oneOf` with strings, numbers or arrays that have different bounds (2 in 578). Both are refused. Lookaheads
after `^` (4 in 578) stay: zod writes them for e-mail addresses.

## What it costs

llguidance serves a grammar at once, on the host while the device computes. On a GPU with decode steps of 64 rows below
3 ms, measured at the start, a grammar that returns becomes an automaton on the device. It does so once the host has
spent the expected time of the build on its masks, if the automaton is small.

Longer steps hide the masks, so none is built. `callboard:structured_outputs_total` counts outputs by engine.

On an H200, random weights, 64 rows with one schema of open strings, median step in ms (`python -m
benchmarks.engine.structured_steps --model llama-3.1-8b --tokenizer FOLDER`;
[lines](../benchmarks/results/structured.jsonl)):

| model | free | llguidance | automaton |
| --- | --- | --- | --- |
| Llama-3.1-8B's shape | 4.96 | 5.01 (+1.1 %) | 4.97 (+0.2 %) |
| Llama-3.2-1B's shape | 1.15 | 2.44 (+112 %) | 1.25 (+8.1 %) |

Steps below two milliseconds do not hide the host's work for 64 rows. Time to the first token of a known grammar (8B,
one request, in process):

| prompt | free, ms | llguidance, ms | automaton, ms |
| --- | --- | --- | --- |
| 1,024 tokens | 22.6 | 22.5 | 22.6 |
| 64 tokens | 9.6 | 10.1 | 10.4 |

On a CPU core (AMD Zen 4), a corpus of 196 schemas (`python -m benchmarks.engine.grammar --tokenizer FOLDER ...
--eager 40`): a child compiles one in 1.6 ms (p99 9.9). By vocabulary, p50 / p99, with the automata of small schemas:

| vocabulary | set up | a new grammar, ms | mask and advance of a row, us (mean) | automaton, ms |
| --- | --- | --- | --- | --- |
| 49,152 | 0.09 s | 0.6 / 1.2 | 11 / 328 (26) | 7 / 63 |
| 128,256 | 0.26 s | 0.6 / 1.2 | 18 / 905 (50) | 27 / 191 |
| 151,665 | 0.27 s | 0.7 / 1.3 | 13 / 1,058 (46) | 36 / 222 |

The first mask at a place in a grammar is the slow one. The largest grammar's matcher (256 KiB) takes some 30 ms. A
runner thread makes matchers for new grammars: the rows that need them wait, and other rows continue. A grammar's
text travels once to each engine, and once to its runners.

Automata for real schemas take longer: some 3 ns of CPU time per byte of the expression and token in the vocabulary.
Types in OpenAI's API as closed objects, 30 each, with 49,152 tokens (`python -m benchmarks.engine.grammar
--tokenizer FOLDER --api 30`), CPU seconds:

| properties | built | p50 | p90 | p99 |
| --- | --- | --- | --- | --- |
| 1 to 60 | 29 | 0.07 | 0.22 | 0.42 |
| 10 to 60 | 22 | 0.52 | 1.0 | 1.1 |

The others have over 4,096 states or took over five seconds. At 20 us of host time a token (Llama-3.2-1B's shape above:
1.29 ms for 64 rows), an automaton that takes half a second has paid after 25,000 tokens.

Eight streams of SmolLM2 share two cores with the front and the engine while a client posts 11 harmful grammars a second
(`grammar_bombs` of 7be48e03). Of these, 225 got a 400 and 102 a right answer, the slowest
after 0.9 s:

| | inter-token time, ms | p99 |
| --- | --- | --- |
| alone | 41 | 59 |
| with harmful grammars | 47 | 98 |
"""

# Keywords of drafts and of OpenAPI that assert nothing.
_OF_DOCUMENTS = ("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description", "default")
_OF_USES = ("examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "discriminator")
ANNOTATIONS = frozenset((*_OF_DOCUMENTS, *_OF_USES, "$dynamicAnchor", "$vocabulary", "contentSchema"))


def page() -> str:
    lines = [f"| `{word}` | {_NOTES.get(word, 'yes')} |" for word in sorted(keywords.KEYWORDS, key=str.lower)]
    return (
        _HEAD
        + "\n".join(lines)
        + "\n\nThese are refused, each by its path: "
        + ", ".join(f"`{word}`" for word in keywords.REFUSED)
        + ". Nothing is fetched: a `$ref` stays within its schema.\n\nThese assert nothing: "
        + ", ".join(f"`{word}`" for word in sorted(ANNOTATIONS, key=str.lower))
        + ", other formats, and any name outside the drafts and OpenAPI"
        + _STRICT
        + "## Limits\n\n| of | at most |\n| --- | --- |\n"
        + "".join(f"| {what} | {most:,} |\n" for what, most in _LIMITS.items())
        + _MEASURED
    )


def test_the_page_is_up_to_date():
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.grammar.test_structured_docs"


def test_each_keyword_of_the_page_is_in_the_corpus():
    text = str(CASES)
    assert [word for word in (*keywords.KEYWORDS, *FORMATS) if f"'{word}'" not in text] == []
    refused = str(REFUSED)
    assert [word for word in ("not", "if", "contains", "$dynamicRef") if f"'{word}'" not in refused] == []
    assert _NOTES.keys() <= keywords.KEYWORDS


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
