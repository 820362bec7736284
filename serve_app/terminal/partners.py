"""The models that `callboard chat` talks to: one in this process, or one behind an OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError, FinishReason, SamplingParams
from serve_app.terminal.loading import load

TERMINAL_DEFAULTS = {"temperature": 0.7}  # where neither the user nor the model gives a value
MAX_TOKENS = 1024  # an answer's tokens, where the user gives no number
_BAD_REQUEST = 400


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended."""

    num_tokens: int = 0  # 0 if a server did not report it
    was_cut: bool = False  # it reached the most tokens


class Partner(Protocol):
    """One side of the talk."""

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, Ending]:
        """The answer to a conversation, in pieces; raises CallboardError if there is none."""


class LocalModel:
    """A model in this process."""

    def __init__(self, config: EngineConfig, given: dict[str, Any]) -> None:
        """`given` are fields of SamplingParams; other values come from the model, or from TERMINAL_DEFAULTS."""
        self._llm = load(config)
        self._fields = TERMINAL_DEFAULTS | self._llm.defaults.values | given

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, Ending]:
        prompt = self._llm.chat_prompt(messages)
        room = self._llm.runner.info.max_model_len - len(prompt)
        if room < 1:
            raise CallboardError("The conversation fills the model's context; start a new one with /clear.")
        fields: dict[str, Any] = {"max_tokens": min(room, MAX_TOKENS), **self._fields}
        done = yield from self._llm.stream(prompt, SamplingParams(**fields))
        return Ending(len(done.token_ids), done.finish_reason is FinishReason.LENGTH)


class RemoteModel:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, url: str, given: dict[str, Any], api_key: str | None = None) -> None:
        """`given` are fields of SamplingParams. Other values are as in `LocalModel` if the server is Callboard, which
        reports the model's own; another server uses its own."""
        import httpx

        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        root = url.rstrip("/").removesuffix("/v1")
        self._base = root + "/v1"
        self._http = httpx.Client(timeout=httpx.Timeout(10, read=None), headers=headers)
        try:
            models = self._http.get(f"{self._base}/models").raise_for_status().json()
            model = models["data"][0]["id"]
            own = self._own_sampling(root)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as e:
            if isinstance(e, httpx.HTTPStatusError) and e.response.status_code == 401:
                which = "needs an API key" if api_key is None else "does not know the API key"
                raise CallboardError(f"{self._base} {which}; pass --api-key or set CALLBOARD_API_KEY.") from e
            raise CallboardError(f"No OpenAI-compatible server answers at {self._base}: {e}; check --url.") from e
        sampling = given if own is None else TERMINAL_DEFAULTS | own | given
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **sampling}

    def _own_sampling(self, root: str) -> dict[str, float] | None:
        """The sampling that the model's makers recommend; None if the server does not report it."""
        response = self._http.get(f"{root}/server_info")
        if response.status_code != 200 or "json" not in response.headers.get("content-type", ""):
            return None
        found = response.json()
        return found.get("sampling") if isinstance(found, dict) else None

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, Ending]:
        import httpx

        body = {"max_tokens": MAX_TOKENS, **self._fields, "messages": messages}
        try:
            try:
                return (yield from self._stream(body))
            except _Refused:
                if "max_tokens" in self._fields:
                    raise
            del body["max_tokens"]  # the context may have room for fewer
            return (yield from self._stream(body))
        except httpx.HTTPError as e:
            raise CallboardError(f"The connection to {self._base} failed: {e or type(e).__name__}.") from e

    def _stream(self, body: dict[str, Any]) -> Generator[str, None, Ending]:
        """The pieces of one answer; raises _Refused if the server calls the request wrong."""
        num_tokens, was_cut = 0, False
        with self._http.stream("POST", f"{self._base}/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                refusal = _Refused if response.status_code == _BAD_REQUEST else CallboardError
                raise refusal(_error_message(response.text))
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                text, reason, count = read_event(data)
                num_tokens, was_cut = count or num_tokens, was_cut or reason == "length"
                yield text
                if reason == "abort":
                    raise CallboardError("The server ended this answer; send the message again.")
        return Ending(num_tokens, was_cut)


class _Refused(CallboardError):
    """A server's status 400."""


def read_event(data: str) -> tuple[str, str | None, int]:
    """One event's text, the reason why the answer ended or None, and its tokens until then or 0.

    Raises CallboardError if the event is an error, or not one of a chat."""
    try:
        event = json.loads(data)
        if "error" not in event:
            choices = event["choices"]
            text = "".join(str(choice["delta"].get("content") or "") for choice in choices)
            reasons = [choice.get("finish_reason") for choice in choices]
            return text, next(filter(None, reasons), None), int((event.get("usage") or {}).get("completion_tokens", 0))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CallboardError(f"The server sent an event that is none of a chat: {data[:200]}") from e
    raise CallboardError(_error_message(data))


def _error_message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered: {body[:200]}"
