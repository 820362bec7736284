"""The prompt of a classifier for a query and a document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from runtime.base.model.pooling import Pooling
from runtime.text.tokenizer import Tokenizer

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


Part = Literal["template", "query", "document", "rest"]  # "rest" follows a query that begins a chat
Encode = Callable[[str, bool, Part], list[int]]  # (text, adds special tokens, part)


def encoder_of(tokenizer: Tokenizer, part: Part) -> Callable[[str, bool], list[int]]:
    """Return the encoder of a part. Special tokens in queries and documents are plain text."""
    return tokenizer.encode if part in ("template", "rest") else tokenizer.encode_contents


class PairPrompter:
    """Token ids for pairs, in the form that a model was trained on.

    For Qwen3's rerankers a pair stands in a chat with an instruction. For others the document follows the query. Each
    query is encoded once for all its documents."""

    def __init__(
        self, encode: Encode, pooling: Pooling, instruction: str | None = None, most: int | None = None
    ) -> None:
        """`encode` may cut a text after `most` ids, because prompts are not longer."""
        self._encode, self._most = encode, most
        self._is_chat, self._instruction = pooling.pairs == "qwen3", instruction or DEFAULT_INSTRUCTION
        self._queries: dict[str, list[int]] = {}
        self._head = self._tail = list[int]()
        if self._is_chat:
            self._head, self._tail = (encode(text, False, "template") for text in (_QWEN3_HEAD, _QWEN3_TAIL))

    def ids(self, query: str, document: str) -> list[int]:
        """Return the prompt of one pair. The document is cut to fit `most` ids.

        A query that itself begins a chat is not changed, and its document is the rest of that chat."""
        has_chat = self._is_chat and query.startswith("<|im_start|>")
        if (before := self._queries.get(query)) is None:
            before = self._queries[query] = self._of_query(query, has_chat)[: self._most]
        if not self._is_chat or has_chat:
            return [*before, *self._encode(document, False, "rest" if has_chat else "document")][: self._most]
        body = [*before, *self._encode(f" {document}", False, "document")]
        if self._most is not None:
            body = body[: max(0, self._most - len(self._head) - len(self._tail))]
        return [*self._head, *body, *self._tail]

    def _of_query(self, query: str, has_chat: bool) -> list[int]:
        if not self._is_chat or has_chat:
            return self._encode(query, not has_chat, "template" if has_chat else "query")
        # In these models no token joins a colon to the space after it, so the document can be encoded separately.
        text = f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>:"
        return self._encode(text, False, "query")
