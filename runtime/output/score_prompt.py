"""The prompt that a classifier reads a query and a document from."""

from __future__ import annotations

from runtime.core.pooling import Pooling
from runtime.text.tokenizer import Tokenizer

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PairPrompter:
    """Token ids of pairs, as a model was trained on them: those of Qwen3's rerankers stand in a chat with an
    instruction; of others the document follows the query."""

    def __init__(self, tokenizer: Tokenizer, pooling: Pooling) -> None:
        self._tokenizer, self._is_chat = tokenizer, pooling.pairs == "qwen3"

    def ids(self, query: str, document: str, instruction: str | None, most: int | None) -> list[int]:
        """At most so many, if that is given, with the end of the document cut off. A query that begins a chat itself
        is taken as the client wrote it, its document as the rest of that chat."""
        encode = self._tokenizer.encode
        if not self._is_chat:
            return [*encode(query), *encode(document, add_special_tokens=False)][:most]
        if query.startswith("<|im_start|>"):
            return encode(query + document, add_special_tokens=False)[:most]
        head, tail = encode(_QWEN3_HEAD, add_special_tokens=False), encode(_QWEN3_TAIL, add_special_tokens=False)
        text = f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        body = encode(text, add_special_tokens=False)
        return [*head, *(body if most is None else body[: max(0, most - len(head) - len(tail))]), *tail]
