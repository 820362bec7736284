"""Requests for vectors and scores: /v1/embeddings, /pooling, /score and /rerank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from runtime.output.fields import invalid
from serve_app.apis.chat.messages import ChatMessage, check_new_parts
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.completions.request import PromptValue, prompts_of
from serve_app.protocol.other_servers import UNSUPPORTED_FIELDS, UnsupportedField, refused_fields
from serve_app.protocol.shapes import OpenRequestModel, RequestModel, TextOrList, only, text_or_list_of

_REFUSED = refused_fields(
    {
        "leave it out": """
            use_activation=true activation=true softmax=true normalize=true embed_dtype="float32" endianness="native"
            return_token_ids=false late_chunking=false""",
        "send input": "messages=[] prompt",
    }
)
_Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[
    TextOrList[_Text, Annotated[list[_Text], Field(min_length=1, fail_fast=True)]], text_or_list_of("texts")
]


class PooledFields(OpenRequestModel):
    """The fields that all of these requests share; those from `priority` on are extensions."""

    refused: ClassVar[dict[str, UnsupportedField]] = _REFUSED

    model: str | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    add_special_tokens: bool = True
    # kept from the start; -1 keeps what fits
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None

    def count(self) -> tuple[str, int]:
        """Return the field with the texts, and their number."""
        raise NotImplementedError

    def check(self) -> None:
        super().check()
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "is 0, which would leave no prompt; use -1 for all that fits")


class PoolingRequest(PooledFields):
    """POST /pooling."""

    token_ids_field: ClassVar[str | None] = "input"

    input: PromptValue
    encoding_format: Literal["float", "base64"] = "float"

    def inputs(self) -> Sequence[str | list[int]]:
        """Return the inputs as a list, each a text or token ids."""
        return prompts_of(self.input)

    def count(self) -> tuple[str, int]:
        return "input", len(self.inputs())


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings."""

    dimensions: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None


class PoolingChatRequest(PoolingRequest):
    """POST /pooling of a chat, which has one vector."""

    refused: ClassVar[dict[str, UnsupportedField]] = _REFUSED | {"chat_template": UNSUPPORTED_FIELDS["chat_template"]}

    input: Annotated[Any, only(None, remedy="send messages or input, not both")] = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    add_special_tokens: bool = False
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: Annotated[Any, only(None, remedy="a chat is not cut; leave it out")] = None

    def count(self) -> tuple[str, int]:
        return "messages", 1

    def check(self) -> None:
        super().check()
        # A vector of a chat without one of its parts would be another one, so older parts are checked as new ones.
        check_new_parts("messages", [("user", message.content) for message in self.messages])
        self.chat().check()

    def chat(self) -> ChatRequest:
        """Return the chat with the fields that make its prompt."""
        names = (
            "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
        )  # fmt: skip
        return ChatRequest.model_construct(**{name: getattr(self, name) for name in names})

    def ignored_fields(self) -> list[str]:
        return super().ignored_fields() + self.chat().ignored_fields()


class EmbeddingChatRequest(PoolingChatRequest, EmbeddingRequest):
    """POST /v1/embeddings of a chat."""


class PoolingKind(RequestModel):
    """The field that distinguishes a chat."""

    token_ids_field: ClassVar[str | None] = "input"

    messages: Any = None


class ScoreRequest(PooledFields):
    """POST /score: one text against each of the others, or two lists pair by pair."""

    text_1: _Texts
    text_2: _Texts
    instruction: str | None = None  # an extension for rerankers with instructions

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs; raises FieldError if the lists have different lengths."""
        first, second = ([t] if isinstance(t, str) else t for t in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            raise invalid("text_1", f"has {len(first)} texts for {len(second)} of text_2; send one, or as many")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    def count(self) -> tuple[str, int]:
        return "text_2", len(self.pairs())


class DocumentText(RequestModel):
    """A document as an object."""

    text: _Text


_Document = Annotated[
    Annotated[_Text, Tag("<text>")] | Annotated[DocumentText, Tag("<object>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<object>"),
]


class RerankRequest(PooledFields):
    """POST /rerank, as vLLM, Jina and Cohere have it."""

    query: _Text
    documents: Annotated[list[_Document], Field(min_length=1, fail_fast=True)]
    top_n: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # None and 0 mean all
    return_documents: bool | None = None
    instruction: str | None = None  # an extension, as in ScoreRequest

    def texts(self) -> list[str]:
        """Return the texts of the documents."""
        return [d if isinstance(d, str) else d.text for d in self.documents]

    def count(self) -> tuple[str, int]:
        return "documents", len(self.documents)
