"""POST /v1/chat/completions: a conversation, answered."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, NamedTuple

from runtime.base.config import NGRAM
from runtime.base.images import ImageSpan
from runtime.output.fields import invalid
from runtime.output.message_parser import MessageFormat
from runtime.output.processor import Delta
from runtime.text.tool_calls import CallDelta
from serve_app.apis.chat.answers import ChatCompletion
from serve_app.apis.chat.images import unseen, with_images
from serve_app.apis.chat.messages import INSTRUCTING, ROLES
from serve_app.apis.chat.request import ChatRequest
from serve_app.protocol.answers import encode_json, listed, logprob_entry
from serve_app.protocol.errors import ApiError
from serve_app.protocol.operation import GENERATION, Operation
from serve_app.protocol.prepared_request import PreparedRequest, Prompts, ServedModel
from serve_app.protocol.prompt_ids import prompt_ids
from serve_app.protocol.sse import ChoiceRenderer, ChunkStream, EventStream
from serve_app.service.endpoint import Endpoint, answer_with, of_prompt


class ChatIds(NamedTuple):
    """A chat's prompt."""

    token_ids: list[int]
    message_format: MessageFormat | None  # the format of the message after it; None if all is content
    images: tuple[ImageSpan, ...]
    unseen: tuple[str, ...]  # kinds of parts in the messages that the model does not see


class ChatEndpoint(Endpoint[ChatRequest]):
    """Messages in, a message out, with reasoning and tool calls."""

    path, request_type, id_prefix, default_max_tokens = "/v1/chat/completions", ChatRequest, "chatcmpl-", None
    operation = Operation("Answer a chat", ChatCompletion, (ChatRequest,), GENERATION, streams=True)
    renders_chats = True
    keeps_aborted = True

    def prompts(self, request: ChatRequest, model: ServedModel, where: str = "messages") -> Prompts:
        """Return the prompt; `where` is the client's field with the messages."""
        ids, form, images, ignored = self.prompt(request, model, where)
        assert model.chats is not None, "the prompt was made with it"
        prompt, grammar = self.truncated(request, ids, model), model.chats.grammar(request, form)
        predicted = _predicted(request, model)
        if request.prediction is not None and not predicted:
            ignored += ("prediction",)
        if request.thinking_token_budget is not None and not model.chats.limits_reasoning:
            ignored += ("thinking_token_budget",)
        if request.reasoning_effort is not None and not model.chats.reads_effort(request.reasoning_effort):
            ignored += ("reasoning_effort",)
        return Prompts([prompt], where, grammar, form, predicted, ignored, images=images)

    def prompt(self, request: ChatRequest, model: ServedModel, where: str = "messages") -> ChatIds:
        """Return a chat's token ids, the format of the model's message after them, and its images."""
        chats = model.chats
        if chats is None:
            raise ApiError(400, f"{model.name!r} has no chat template; use /v1/completions with a plain prompt.")
        roles = chats.roles.union(ROLES)
        for i, message in enumerate(request.messages):
            if message.role not in roles:
                known = ", ".join(map(repr, [*ROLES, *sorted(roles.difference(ROLES))]))
                raise invalid(f"messages.{i}.role", f"is {message.role!r}; this model's messages have {known}")
        ignored = unseen("messages", request, model)

        def encode(messages: list[dict[str, Any]]) -> tuple[list[int], MessageFormat | None]:
            prompt = chats.prompt(messages, request)
            return model.encode(request, prompt.source, False, where, prompt.encode), prompt.message_format

        ids, form = encode(request.template_messages(model.images is not None))
        ids, images = with_images(request, model, ids, lambda messages: encode(messages)[0], where)
        return ChatIds(ids, form, images, ignored)

    def parts(self, request: ChatRequest, model: ServedModel) -> dict[str, int]:
        """Return the tokens in tools and in instructions, without the template's words around them."""

        def count(text: str) -> int:
            return len(prompt_ids(model.tokenizer.encode, text, False, model.info.max_model_len, "", part="start"))

        tools = json.dumps(request.template_tools, ensure_ascii=False) if request.template_tools else ""
        system = "".join(message.text() for message in request.messages if message.role in INSTRUCTING)
        return {"tools": count(tools), "system": count(system)}

    def answer(self, prepared: PreparedRequest[ChatRequest], choices: list[Delta]) -> bytes:
        rendered = [
            {"index": choice.index, "message": _message(choice)} | ChatRenderer(prepared, choice.index).rest(choice)
            for choice in choices
        ]
        return answer_with(prepared, "chat.completion", choices, rendered, **of_prompt(prepared, choices[-1]))

    def stream(self, prepared: PreparedRequest[ChatRequest], include_usage: bool) -> EventStream:
        return ChatStream(prepared, include_usage)


CHAT = ChatEndpoint()


class ChatRenderer(ChoiceRenderer):
    """Renders one choice of a chat."""

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        as_ids = self._prepared.request.return_tokens_as_token_ids
        entry = partial(logprob_entry, self._prepared.tokenizer, as_ids)
        return {"content": listed(delta.logprobs, entry), "refusal": None} if delta.logprobs else None


class ChatStream(ChunkStream):
    """A chat's chunks. If the output is parsed, each piece of a call is an event, as clients expect."""

    opening, closing = b',"delta":{"content":', b"}"

    def __init__(self, prepared: PreparedRequest[ChatRequest], include_usage: bool) -> None:
        renderers = [ChatRenderer(prepared, i) for i in range(len(prepared.requests))]
        super().__init__(prepared, "chat.completion.chunk", renderers, include_usage)
        self._is_parsed = prepared.prompts.message_format is not None

    def first(self) -> bytes:
        """The roles of the choices."""
        content = b"null" if self._is_parsed else b'""'  # null, since an answer may only have calls
        role = b',"delta":{"role":"assistant","content":' + content + b"}" + self._unfinished
        if self._prepared.request.shows_prompt_ids:
            role += b',"prompt_token_ids":' + encode_json(self._prepared.prompts.token_ids[0])
        return b"".join(self._head + b'{"index":%d' % i + role + self._end(i) for i in range(len(self._prefixes)))

    def _event(self, delta: Delta) -> bytes:
        return self._message_events(delta) if self._is_parsed else super()._event(delta)

    def _message_events(self, delta: Delta) -> bytes:
        fields = message_delta(delta)
        calls = fields.pop("tool_calls", ())
        if delta.text:
            fields["content"] = delta.text
        deltas = [fields] if fields or not calls else []
        deltas += [{"tool_calls": [call]} for call in calls]
        choices: list[dict[str, Any]] = [
            {"index": delta.index, "delta": d, "logprobs": None, "finish_reason": None} for d in deltas
        ]
        choices[-1] |= self._choices[delta.index].rest(delta)
        return b"".join(self._head + encode_json(choice) + b"]" + self._end(delta.index) for choice in choices)


def _predicted(request: ChatRequest, model: ServedModel) -> tuple[int, ...]:
    """Return the token ids of a prediction, or none unless drafts come from n-grams."""
    if request.prediction is None or model.draft != NGRAM:
        return ()
    limit = model.info.max_model_len
    ids = prompt_ids(model.tokenizer.encode, request.prediction.text(), False, limit, "prediction", part="start")
    return tuple(ids[:limit])


def message_delta(delta: Delta) -> dict[str, Any]:
    """Return an OpenAI delta's fields besides its content; one call may have several pieces."""
    return _fields(delta, [{"index": c.index} | (_call(c) if c.name else _more(c)) for c in delta.calls])


def _message(choice: Delta) -> dict[str, Any]:
    fields = _fields(choice, [_call(call) for call in choice.calls])
    return {"role": "assistant", "content": choice.text or (None if fields else ""), "refusal": None, **fields}


def _fields(delta: Delta, calls: list[dict[str, Any]]) -> dict[str, Any]:
    # vLLM's present name, and its earlier one, which other servers use.
    names = ("reasoning", "reasoning_content") if delta.reasoning else ()
    fields: dict[str, Any] = dict.fromkeys(names, delta.reasoning)
    return fields | {"tool_calls": calls} if calls else fields


def _call(call: CallDelta) -> dict[str, Any]:
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _more(call: CallDelta) -> dict[str, Any]:
    """Return another piece of a call."""
    return {"custom": {"input": call.arguments}} if call.is_custom else {"function": {"arguments": call.arguments}}
