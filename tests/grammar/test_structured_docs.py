"""docs/structured-output.md is what the code says; `python -m tests.grammar.test_structured_docs` writes it."""

from pathlib import Path

from runtime.structured import pattern, rules, tags
from runtime.structured.grammar import MAX_BYTES
from runtime.structured.schema import keywords
from runtime.structured.schema import writer as schema
from runtime.structured.schema.formats import FORMATS
from tests.support.structured.corpus import CASES, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "structured-output.md"
_NOTES = {
    "$ref": "within the schema: a pointer (`#/…`), an `$anchor`, an `$id`; recursion to any depth",
    "additionalItems": "after a list of `items` (draft 7 and before)",
    "additionalProperties": "missing beside `properties` or `patternProperties`, it means false",
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
    "oneOf": "where no value fits two options, or objects have a tag, or a property that the others can be without",
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

An answer can be bound to a JSON Schema, a regular expression, a choice of texts or a grammar, or have regions that are.
What is answered then fits, whatever
the temperature; an answer that ends by `max_tokens` is cut off where it is, and says `length`. What cannot be enforced
is refused with a 400 that names the keyword or the limit. Before a token is chosen, what does not
fit is ruled out, and then penalties, temperature and filters apply; `min_tokens` holds nothing back that is the only
way on. Log-probabilities are those of the model alone.

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

White space is at most one space after each comma and colon. In strings, characters stand for themselves, and what JSON
does not allow is escaped in the shortest way. Integers have up to 19 digits.
A model that reasons does so first; the structure begins after `</think>`.

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

A text with `::=` is EBNF as llama.cpp (GBNF), XGrammar and SGLang write it, and begins with the rule `root`; any
other is Lark's form, with terminals, `%ignore`, `%import common.NAME` and `"a".."z"`, and begins with `start`. Rules
may recurse in any way. A grammar says which texts there are, character by character, and every one of them can be
written, however its tokens are cut: terminals of Lark's form too match as little or as much as lets the rest fit. `i`
makes ASCII letters match in both cases; regular expressions have what a schema's `pattern` may have. What is refused
is named with its line and column: lookaheads, tokens (`<|eot|>`), attributes and templates of rules, `%declare`,
`%json` and the like.

```
root ::= call ("; " call)*
call ::= [a-z]+ "(" (argument (", " argument)*)? ")"
argument ::= [0-9]+ | call
```

Rules without recursion become one terminal each, which costs what a regular expression costs. Where the end of a
terminal depends on what follows (`[a-z]+ "end"` beside a recursion), it is read by single characters: free text of
this kind takes longer to mask, and too much of it ends with `grammar_failed`.

## Structural tags

Text is free up to a trigger, with which a tag begins; what follows is the rest of that tag's `begin`, its content and
its `end`, and then the text is free again. A trigger that begins no tag cannot be written, in a region whatever fits
can. The newer form has the formats `triggered_tags` (`at_least_one`: the answer begins with a tag;
`stop_after_first`: it ends with the first), `tag`, `tags_with_separator`, `sequence`, `or`, `const_string`,
`any_text`, `json_schema`, `regex` and `grammar`. Free text is the last part of a sequence, or the content of a tag:
it goes up to the first `end`. A regular expression within a tag ends at the first place where `end` follows, too.

## JSON Schema (drafts 4 to 2020-12, and OpenAPI's)

| keyword | enforced |
| --- | --- |
"""

_STRICT = """.

With `"strict": true` everything that asserts something is enforced or refused. With `"strict": false` what cannot be
enforced is ignored, and the header `x-callboard-ignored-fields` has the path of each such keyword; for tools that is
the rule unless `strict` is true. Where `strict` is missing, so it is for one keyword: `uniqueItems` of free items,
which no grammar can enforce, and which a reader that makes a set of them (pydantic's `set`) does not need.

"""

_MEASURED = """
A grammar within these limits may still have too many states to go on somewhere in an answer. That answer ends with the
error `grammar_failed` (a 400, or the last event of a stream that has begun), and no other is touched.

## What it costs

A grammar is served at once by llguidance, on the host while the device computes. On a GPU whose decode steps of 64 rows
take less than 3 ms (measured at the start), one that comes back becomes an automaton that lives on the device: once the
host has spent as much time on its masks as building is expected to take, and if it comes out small. Longer steps hide
the masks, and none is built. `callboard:structured_outputs_total` tells which serves.

On an H200, random weights, 64 rows of one schema of open strings, median step in ms (`python -m
benchmarks.engine.structured_steps --model llama-3.1-8b --tokenizer FOLDER`;
[lines](../benchmarks/results/structured.jsonl)):

| model | free | llguidance | automaton |
| --- | --- | --- | --- |
| Llama-3.1-8B's shape | 4.96 | 5.01 (+1.1 %) | 4.97 (+0.2 %) |
| Llama-3.2-1B's shape | 1.15 | 2.44 (+112 %) | 1.25 (+8.1 %) |

Steps below two milliseconds do not hide what the host does for 64 rows. After a prompt of 1,024 tokens the first token
of a known grammar comes when a free one does (8B, one request, in process: 22.6, 22.5 and 22.6 ms); after 64 tokens,
whose prefill waits for the host's launches, 0.5 and 0.8 ms later (9.6, 10.1, 10.4).

On a CPU core (AMD Zen 4), a corpus of 196 schemas (`python -m benchmarks.engine.grammar --tokenizer FOLDER ...
--eager 40`):
compiling in the child takes 1.6 ms (p99 9.9). By vocabulary, times p50 / p99, the automata of small schemas:

| vocabulary | set up | a new grammar, ms | mask and advance of a row, us (mean) | automaton, ms |
| --- | --- | --- | --- | --- |
| 49,152 | 0.09 s | 0.6 / 1.2 | 11 / 328 (26) | 7 / 63 |
| 128,256 | 0.26 s | 0.6 / 1.2 | 18 / 905 (50) | 27 / 191 |
| 151,665 | 0.27 s | 0.7 / 1.3 | 13 / 1,058 (46) | 36 / 222 |

Of the schemas of SchemaStore (575), Berkeley's function-calling tools (500 drawn) and JSON-Schema-Test-Suite (draft
2020-12: 438), compiled as with `strict: true` beside llguidance's own JSON compiler (`python -m
benchmarks.engine.grammar_suite FOLDER`, one core of a busy machine):

| schemas | accepted | llguidance | ms, p50 / p90 | llguidance | invalid instances taken | llguidance |
| --- | --- | --- | --- | --- | --- | --- |
| SchemaStore | 53.2 % | 40.9 % | 11 / 54 | 1.9 / 15 | | |
| tools | 100 % | 100 % | 1.4 / 2.1 | 0.6 / 0.7 | | |
| test suite | 72.8 % | 46.6 % | 1.6 / 2.8 | 0.6 / 1.0 | 0 | 15 |

A matcher of the largest grammar (256 KiB) takes some 30 ms. Matchers of new grammars are made on a thread of the
runner: the rows that need them wait, and the other rows of a step go on. A grammar's text travels once to each engine,
and once to its runners.

The slow masks are the first in a place of a grammar that nobody has been to.

Automata of real schemas take longer: CPU time goes by the length of the expression, some 3 ns for a byte and a token of
the vocabulary. Types of OpenAI's API as closed objects, 30 of each, with 49,152 tokens (`python -m
benchmarks.engine.grammar --tokenizer FOLDER --api 30`), CPU seconds:

| properties | built | p50 | p90 | p99 |
| --- | --- | --- | --- | --- |
| 1 to 60 | 29 | 0.07 | 0.22 | 0.42 |
| 10 to 60 | 22 | 0.52 | 1.0 | 1.1 |

The others have over 4,096 states or took over five seconds. At 20 us of the host a token
(Llama-3.2-1B's shape above: 1.29 ms for 64 rows), an automaton of half a second has paid after 25,000 tokens.

Eight streams of SmolLM2 on two cores, which front, engine and model share, had inter-token times of 41 ms (p99 59)
alone and 47 ms (p99 98) while a client posted 11 grammars a second that mean harm; of these 225 were a 400 and 102 a
right answer, the slowest after 0.9 s (`python -m benchmarks.serving.grammar_bombs --url URL`).
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
        + ", other formats, and any name that no draft and not OpenAPI defines"
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
