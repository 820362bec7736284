"""From what a client asks for to what the engines take, with every limit on the way.

`compiled` can take long and much memory for a grammar that means harm: it belongs into a child process (child.py).
"""

from __future__ import annotations

import json
from hashlib import blake2b

import numpy as np

from runtime.core.types import CallboardError, Grammar, GrammarSpec
from runtime.structured import rules, schema
from runtime.structured.lazy import LazyEngine
from runtime.structured.pattern import MAX_STATES, Either, GrammarError, literal, plain, size, whole
from runtime.structured.rules import Rule, Terminal, terminal
from runtime.structured.vocabulary import BYTES

MAX_BYTES = 262_144  # of a specification
_BYTES = LazyEngine(BYTES)  # what a grammar says does not depend on the vocabulary


def compiled(spec: GrammarSpec) -> Grammar:
    """Raises GrammarError, a sentence about the specification without its subject."""
    if len(spec.text) > MAX_BYTES:
        raise GrammarError(f"has {len(spec.text)} bytes; the limit is {MAX_BYTES} bytes")
    written: dict[str, Rule]
    match spec.kind:
        case "json":
            written = schema.rules_of(schema.parse(spec.text, MAX_BYTES), _fits)
        case "regex":
            written = {"start": terminal(plain(whole(spec.text)))}
        case "choice":
            options = Either(tuple(literal(text) for text in dict.fromkeys(json.loads(spec.text))))
            if (states := size(options)) > MAX_STATES:
                raise GrammarError(f"has choices of {states} characters; the limit is {MAX_STATES}")
            written = {"start": terminal(plain(options))}
    written = rules.pruned(written)
    text = rules.lark(written)
    if reason := _fault(text):
        raise GrammarError(reason)
    key = blake2b(text.encode(), digest_size=16).hexdigest()
    return Grammar(key, text, rules.expression(written))


def _fits(each: Terminal) -> bool:
    return not _fault(rules.lark({"start": each}))


def _fault(lark: str) -> str:
    """Why no output can even begin; "" if one can."""
    mask = np.zeros(BYTES.num_words, np.int32)
    try:
        _BYTES.matcher(lark).fill(mask)
    except CallboardError as e:
        return f"cannot be used: {e}"
    return "" if mask.any() else "cannot be satisfied: no text fits it"
