"""Clients' texts remain texts: a message that spells `<|im_end|>` does not end its turn.

A rendered prompt does not show which of its marks are the template's. So before the template runs, a character that the
conversation lacks, the seam, splits each text that spells a mark. Marks without a seam are the template's own. They get
other names, the seams are removed, and such prompts' encoder has only these names. To its model, normalizer and
pre-tokenizer all other text is plain. Most conversations do not spell a mark."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import tokenizers

from runtime.base.types import CallboardError
from runtime.text.reasoning import TOKENS
from runtime.text.tool_calls import FORMATS
from runtime.text.tool_calls.harmony import CHANNEL_MARKS

_MARKS = TOKENS.union(*(form.marks for form in FORMATS.values()))
_ANSWER_MARKS = _MARKS.difference(CHANNEL_MARKS)  # these do not end a turn
_WITH_BARS = re.compile(r"<[|｜].*>|<.*[|｜]>", re.DOTALL)
_JOINED = "content", "name", "reasoning_content", "reasoning", "thinking"  # a template may join them with its own text
_ENDS_OF_LITERALS = re.compile(r"""['"]|\s{0,99}\{[{%]""")  # literals' ends in a template's source
_SEAMS = tuple(map(chr, range(0xE002, 0xF900)))  # private-use characters; U+E000 and U+E001 are in names


class Conversation(NamedTuple):
    """The values from a client that a template renders."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    kwargs: Mapping[str, Any]
    seam: str = ""  # splits marks that the client's texts spell; empty without one


def without_seams(text: str, seam: str) -> str:
    return text.replace(seam, "").replace(_escaped(seam), "") if seam else text


class ControlTokens:
    """Tokens that a template may write and a client's text may not: special tokens, and marks of turns and calls."""

    def __init__(self, backend: tokenizers.Tokenizer, template: str) -> None:
        """`template` has the texts in which marks stand. Other added tokens, such as runs of spaces, are text."""
        self._backend, self._template = backend, template
        self._added = dict(backend.get_added_tokens_decoder())
        texts = [token.content for token in self._added.values() if _is_control(token, template)]
        self._spelled = re.compile(_any_of(texts))
        self._spelled_in_json = re.compile(_any_of(_json(text)[1:-1] for text in texts))
        self._heads, self._heads_in_answers = _heads_of(texts), _heads_of(set(texts) - _ANSWER_MARKS)
        self._starts = {text[:n] for text in texts for n in range(1, len(text))}
        self._first_chars = {text[0] for text in texts}
        self._longest = max(map(len, texts), default=0)
        ends = (end.start() for end in _ENDS_OF_LITERALS.finditer(template))
        literals = (template[max(0, end - self._longest) : end] for end in ends)
        openings = {t[-n:] for t in literals for n in range(1, self._longest) if t[-n:] in self._starts}
        self._rests = {text[len(start) :] for text in texts for start in openings if text.startswith(start)} - {""}
        self._starts_of_rests = {rest[:n] for rest in self._rests for n in range(1, len(rest) + 1)}
        # A secret is in the names, so that no client can write one.
        self._names = {text: f"\ue000{secrets.randbits(128)}.{n}\ue001" for n, text in enumerate(texts)}

    def are_in(self, text: str) -> bool:
        """Return whether a text spells a control token."""
        return self._spelled.search(text) is not None

    def with_seams(self, given: Conversation) -> Conversation:
        """Return a conversation with texts that stay texts. It is the same one if no text needs a seam.

        An assistant's text keeps the marks of its reasoning and calls. Raises CallboardError if no seam is free."""
        text = _json(given[:3])
        joined = (value for message in given.messages for name in _JOINED for value in _texts(message.get(name)))
        if self._spelled_in_json.search(text) is None and all(self._with_ends("\0", each) == each for each in joined):
            return given
        used = text + self._template
        chars = set(used)
        seam = next((c for c in _SEAMS if c not in chars and _escaped(c) not in used), None)
        if seam is None:
            raise CallboardError("The texts hold every character for private use (U+E002 to U+F8FF); leave one out.")
        split = partial(self._heads.sub, rf"\g<0>{seam}")
        messages = [self._message(message, seam, split) for message in given.messages]
        return Conversation(messages, _changed(given.tools, split), _changed(given.kwargs, split), seam)

    def with_names(self, prompt: str) -> str:
        """Return a rendered prompt with names in place of its control tokens."""
        return self._spelled.sub(lambda mark: self._names[mark[0]], prompt)

    @cached_property
    def encoder(self) -> tokenizers.Tokenizer:
        """The tokenizer of prompts with names. It shares its model with the model's own."""
        encoder, own = tokenizers.Tokenizer(self._backend.model), self._backend
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(own, part)) is not None:
                setattr(encoder, part, value)
        vocabulary = own.get_vocab(with_added_tokens=False).values()
        # A new token's id is the number of tokens. A vocabulary that lacks some ids already has a token with that id.
        lacking = max(vocabulary, default=-1) + 1 - len(vocabulary)
        encoder.add_tokens([f"\ue000{secrets.randbits(128)}.{n}" for n in range(lacking)])
        encoder.add_tokens([self._renamed(token) for token in self._added.values()])
        return encoder

    def ids(self, encoding: tokenizers.Encoding) -> list[int]:
        """Return the model's ids for a result of `encoder`."""
        tokens = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, strict=True)
        return [i for each, text, is_around in tokens for i in ((each,) if is_around else self._own_ids(each, text))]

    def _own_ids(self, token_id: int, text: str) -> Sequence[int]:
        if (own := self._added_ids.get(token_id)) is not None:
            return (own,)
        if token_id not in self._control_ids or text != self._backend.id_to_token(token_id):  # or an unknown character
            return (token_id,)
        # Some vocabularies make plain text a control token. Its parts are other tokens.
        tokenize = self._backend.model.tokenize
        return [i for part in (text[:1], text[1:]) for t in tokenize(part) for i in self._own_ids(t.id, t.value)]

    @cached_property
    def _added_ids(self) -> dict[int, int]:
        """The own id of each token that `encoder` adds."""
        new_ids = self.encoder.get_vocab(with_added_tokens=True)
        return {new_ids[self._renamed(token).content]: i for i, token in self._added.items()}

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        unknown = getattr(self._backend.model, "unk_token", None)
        return frozenset(i for i, token in self._added.items() if token.content in self._names.keys() - {unknown})

    def _renamed(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        if (name := self._names.get(token.content)) is None:
            return token
        return tokenizers.AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)

    def _message(self, message: Mapping[str, Any], seam: str, split: Callable[[str], str]) -> dict[str, Any]:
        is_answer = message.get("role") == "assistant"
        split_joined = partial(self._heads_in_answers.sub, rf"\g<0>{seam}") if is_answer else split

        def joined(value: Any) -> Any:
            if isinstance(value, str):
                return split_joined(self._with_ends(seam, value))
            if isinstance(value, Mapping) and "text" in value:  # one part of a content
                return {**_changed(value, split), "text": joined(value["text"])}
            return [joined(part) for part in value] if isinstance(value, list) else _changed(value, split)

        return {name: joined(value) if name in _JOINED else _changed(value, split) for name, value in message.items()}

    def _with_ends(self, seam: str, text: str) -> str:
        """Return a text with a seam at each end that may form a control token with adjacent text."""
        core = text.strip()
        sizes = range(1, min(len(core) + 1, self._longest))
        continues = core in self._starts_of_rests or (self._rests and any(core[:n] in self._rests for n in sizes))
        start = seam if continues else ""
        may_begin = not self._first_chars.isdisjoint(core[-self._longest :])
        end = seam if may_begin and any(core[-n:] in self._starts for n in sizes) else ""
        return text.replace(core, start + core + end, 1) if start or end else text


def _is_control(token: tokenizers.AddedToken, template: str) -> bool:
    text = token.content
    if len(text) < 2 or text.isspace():
        return False
    is_mark = not (text[0].isalnum() or text[-1].isalnum()) and any(map(str.isalpha, text))
    is_known = text in template or text in _MARKS or _WITH_BARS.fullmatch(text) is not None
    return bool(token.special) or (is_mark and is_known)


def _heads_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a regular expression for the texts' first characters, where the texts follow."""
    heads = ((head, [text[1:] for text in group]) for head, group in groupby(sorted(texts), lambda text: text[0]))
    return re.compile("|".join(f"{re.escape(head)}(?={_any_of(rests)})" for head, rests in heads) or "(?!)")


def _any_of(texts: Iterable[str]) -> str:
    """Return a regular expression of all texts, the longest first. It is a tree, so their number does not cost time."""
    words = sorted(set(texts))
    if len(words) < 2:
        return re.escape(words[0]) if words else "(?!)"
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(words[0], words[-1], strict=False))
    prefix = "".join(char for char, _ in pairs)
    branches = [_any_of(group) for _, group in groupby((word[len(prefix) :] for word in words), lambda rest: rest[:1])]
    return f"{re.escape(prefix)}(?:{'|'.join(reversed(branches))})"


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all its texts and keys changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(each, change) for key, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list | tuple) else value


def _texts(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1]
