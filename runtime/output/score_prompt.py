"""The prompt that a classifier reads a query and a document from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from runtime.spec.pooling import Pooling

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


Encode = Callable[[str, bool, Literal["query", "document"]], list[int]]  # a text, if special tokens go around it


class PairPrompter:
    """Token ids of pairs, as a model was trained on them: those of Qwen3's rerankers stand in a chat with an
    instruction; of others the document follows the query.

    Each query is encoded once, however many documents there are."""

    def __init__(
        self, encode: Encode, pooling: Pooling, instruction: str | None = None, most: int | None = None
    ) -> None:
        """`encode` may leave out what follows the first `most` ids of a text, since no prompt has more."""
        self._encode, self._most = encode, most
        self._is_chat, self._instruction = pooling.pairs == "qwen3", instruction or DEFAULT_INSTRUCTION
        self._queries: dict[str, list[int]] = {}
        self._head = self._tail = list[int]()
        if self._is_chat:
            self._head, self._tail = (encode(text, False, "query") for text in (_QWEN3_HEAD, _QWEN3_TAIL))

    def ids(self, query: str, document: str) -> list[int]:
        """The prompt of one pair, without the end of the document if it would have over `most` ids. A query that begins
        a chat itself is taken as the client wrote it, its document as the rest of that chat."""
        has_chat = self._is_chat and query.startswith("<|im_start|>")
        if (before := self._queries.get(query)) is None:
            before = self._queries[query] = self._of_query(query, has_chat)[: self._most]
        if not self._is_chat or has_chat:
            return [*before, *self._encode(document, False, "document")][: self._most]
        body = [*before, *self._encode(f" {document}", False, "document")]
        if self._most is not None:
            body = body[: max(0, self._most - len(self._head) - len(self._tail))]
        return [*self._head, *body, *self._tail]

    def _of_query(self, query: str, has_chat: bool) -> list[int]:
        if not self._is_chat or has_chat:
            return self._encode(query, not has_chat, "query")
        # No token of these models joins a colon to the space after it, so that the document can be encoded alone.
        text = f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>:"
        return self._encode(text, False, "query")
