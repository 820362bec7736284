"""POST /api/chat and /api/generate: chats and completions in the form of Ollama's clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from runtime.output.processor import Delta
from runtime.text.tool_calls import CallDelta
from serve_app.apis.anthropic.endpoint import parsed_arguments
from serve_app.apis.chat.endpoint import CHAT
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.completions.endpoint import COMPLETIONS
from serve_app.apis.completions.request import CompletionRequest
from serve_app.apis.ollama.answers import OllamaChatLine, OllamaOperation, OllamaText
from serve_app.apis.ollama.request import LoadRequest, OllamaChatRequest, OllamaGenerateRequest
from serve_app.protocol.answers import ChoiceUsage, encode_json, listed, logprob_entry
from serve_app.protocol.dialects import dialect_of
from serve_app.protocol.errors import ApiError
from serve_app.protocol.operation import WHOLE_ANSWERS
from serve_app.protocol.parsing import parse
from serve_app.protocol.prepared_request import PreparedRequest, Prompts, ServedModel
from serve_app.protocol.sampling import SamplingFields
from serve_app.protocol.sse import EventStream
from serve_app.protocol.timed_choice import TimedChoice, Times
from serve_app.service.endpoint import AnsweredAtOnce, Endpoint

_LINES = "application/x-ndjson"


class OllamaEndpoint(Endpoint[SamplingFields]):
    """One route, with an answer of one choice."""

    id_prefix, default_max_tokens, max_tokens_field = "ollama-", None, "options.num_predict"
    renders_chats = True

    body_type: ClassVar[type[OllamaChatRequest] | type[OllamaGenerateRequest]]
    prompt_field: ClassVar[str]  # field with the prompt

    def read(self, body: bytes) -> SamplingFields:
        return parse(self.body_type, body).as_request()

    def prompts(self, request: SamplingFields, model: ServedModel) -> Prompts:
        if isinstance(request, LoadRequest):
            keep_s = request.keep_s() if model.sleeps else None
            end = {"done": True, "done_reason": "unload" if keep_s == 0 else "load"}
            raise AnsweredAtOnce(encode_json(self.line(model, "") | end), model.base, keep_s)
        if isinstance(request, CompletionRequest):
            return COMPLETIONS.prompts(request, model)
        assert isinstance(request, ChatRequest), "`read` makes no others"
        return CHAT.prompts(request, model, self.prompt_field)

    def parts(self, request: SamplingFields, model: ServedModel) -> dict[str, int]:
        return CHAT.parts(request, model) if isinstance(request, ChatRequest) else {}

    def choices(self, prepared: PreparedRequest[SamplingFields]) -> list[Delta]:
        return [TimedChoice()]

    def answer(self, prepared: PreparedRequest[SamplingFields], choices: list[Delta]) -> bytes:
        (choice,) = choices
        assert isinstance(choice, TimedChoice), "`choices` makes it"
        line = self.line(prepared.model, choice.text, choice.reasoning, choice.calls)
        return encode_json(line | _scores(prepared, choice) | _end(prepared, choice, choice.usage, choice.times))

    def stream(self, prepared: PreparedRequest[SamplingFields], include_usage: bool) -> EventStream:
        return LineStream(prepared, self)

    def line(
        self, model: ServedModel, text: str, reasoning: str = "", calls: Sequence[CallDelta] = ()
    ) -> dict[str, Any]:
        """Return the fields of an answer, or of a stream's line, without the fields of its end."""
        head = {"model": model.name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        return head | self._content(text, {"thinking": reasoning} if reasoning else {}, calls)

    def _content(self, text: str, thinking: dict[str, str], calls: Sequence[CallDelta]) -> dict[str, Any]:
        raise NotImplementedError


class OllamaChatEndpoint(OllamaEndpoint):
    """Messages in, a message out."""

    path, body_type, prompt_field = "/api/chat", OllamaChatRequest, "messages"
    _about = "Answer a chat, in Ollama's form", OllamaChatLine, (OllamaChatRequest,), WHOLE_ANSWERS
    operation = OllamaOperation(*_about, streams=True, media_type=_LINES)

    def _content(self, text: str, thinking: dict[str, str], calls: Sequence[CallDelta]) -> dict[str, Any]:
        called = [
            {"id": call.id, "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)}}
            for call in calls
        ]
        message = {"role": "assistant", "content": text, **thinking}
        return {"message": message | ({"tool_calls": called} if called else {})}


class OllamaGenerateEndpoint(OllamaEndpoint):
    """A prompt in, a text out."""

    path, body_type, prompt_field = "/api/generate", OllamaGenerateRequest, "prompt"
    operation = replace(
        OllamaChatEndpoint.operation,
        summary="Answer a prompt, in Ollama's form",
        answer=OllamaText,
        requests=(OllamaGenerateRequest,),
    )

    def _content(self, text: str, thinking: dict[str, str], calls: Sequence[CallDelta]) -> dict[str, Any]:
        return {"response": text, **thinking}


class LineStream(EventStream):
    """The lines of one answer, each a JSON object. A complete call is one line."""

    media_type = _LINES.encode()

    def __init__(self, prepared: PreparedRequest[SamplingFields], endpoint: OllamaEndpoint) -> None:
        self._prepared, self._endpoint = prepared, endpoint
        self._usage, self._times = ChoiceUsage(), Times()
        self._last = Delta(0)
        self._call: CallDelta | None = None  # not yet complete
        self.keep_alive = self._line("")  # a line with an empty text, since clients parse every line

    def events(self, deltas: list[Delta]) -> bytes:
        lines = []
        for delta in deltas:
            self._times.note()
            self._usage.add(delta)
            self._last = delta
            if delta.text or delta.reasoning or delta.logprobs:
                lines.append(self._line(delta.text, delta.reasoning, **_scores(self._prepared, delta)))
            for call in delta.calls:
                if call.name:
                    lines.append(self._whole_call())
                    self._call = replace(call)
                elif self._call is not None:
                    self._call.arguments += call.arguments
        return b"".join(lines)

    def last(self) -> bytes:
        end = self._endpoint.line(self._prepared.model, "")
        end |= _end(self._prepared, self._last, self._usage, self._times)
        return self._whole_call() + encode_json(end) + b"\n"

    def failed(self, error: ApiError) -> bytes:
        return encode_json({"error": error.in_words_of(dialect_of(self._endpoint.path)).message()}) + b"\n"

    def _whole_call(self) -> bytes:
        """Return the line of the last call; empty without one."""
        call, self._call = self._call, None
        return b"" if call is None else self._line("", calls=[call])

    def _line(self, text: str, reasoning: str = "", calls: Sequence[CallDelta] = (), **more: Any) -> bytes:
        line = self._endpoint.line(self._prepared.model, text, reasoning, calls)
        return encode_json(line | more | {"done": False}) + b"\n"


def _durations(times: Times) -> dict[str, int]:
    prompt_ns, output_ns = times.spans()
    return {
        "total_duration": prompt_ns + output_ns,
        "load_duration": 0,  # the model is loaded before any request
        "prompt_eval_duration": prompt_ns,
        "eval_duration": output_ns,
    }


def _end(prepared: PreparedRequest[SamplingFields], delta: Delta, usage: ChoiceUsage, times: Times) -> dict[str, Any]:
    """Return the fields of an answer's last line. `callboard replay` needs those from the id on."""
    return {
        "done": True,
        "done_reason": "length" if delta.finish_reason == "length" else "stop",
        **_durations(times),
        "prompt_eval_count": prepared.requests[0].prompt_len,
        "eval_count": usage.num_output,
        "id": prepared.id,
        "seed": prepared.seed,
        "system_fingerprint": prepared.model.fingerprint,
    }


def _scores(prepared: PreparedRequest[SamplingFields], delta: Delta) -> dict[str, Any]:
    """Return the log-probabilities that the request wants."""
    if not delta.logprobs:
        return {}
    return {"logprobs": listed(delta.logprobs, partial(logprob_entry, prepared.model.tokenizer, None))}
