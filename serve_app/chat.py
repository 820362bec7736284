"""A talk in the terminal, with a model in this process or with one behind an OpenAI-compatible server."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any, Protocol

from runtime.core.config import EngineConfig
from runtime.core.types import CallboardError, SamplingParams


class Partner(Protocol):
    """One side of the talk."""

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """The answer to a conversation, in pieces; raises CallboardError if there is none."""


def talk(partner: Partner, system: str | None) -> None:
    """Reads lines from stdin and prints an answer to each, until stdin ends."""
    history = [{"role": "system", "content": system}] if system else []
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing
    if sys.stdin.isatty():
        print("Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not text.strip():
            continue
        messages = [*history, {"role": "user", "content": text}]
        answer = ""
        try:
            with closing(partner.answer(messages)) as pieces:
                for piece in pieces:
                    answer += piece
                    print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print()
        except CallboardError as e:
            if not sys.stdin.isatty():
                raise
            print(f"callboard: {e}", file=sys.stderr)
            continue
        history = [*messages, {"role": "assistant", "content": answer}]


TERMINAL_DEFAULTS = {"temperature": 0.7}  # where neither the reader nor the model says


class LocalModel:
    """A model in this process."""

    def __init__(self, config: EngineConfig, given: dict[str, Any]) -> None:
        """`given` are fields of SamplingParams; the others are the model's own, and max_tokens as many as fit."""
        from runtime.llm import LLM

        self._llm = LLM(**asdict(config))
        self._fields = TERMINAL_DEFAULTS | self._llm.defaults.values | given

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        prompt = self._llm.chat_prompt(messages)
        room = self._llm.runner.info.max_model_len - len(prompt)
        if room < 1:
            raise CallboardError("The conversation fills the model's context; start a new chat.")
        fields: dict[str, Any] = {"max_tokens": room, **self._fields}
        yield from self._llm.stream(prompt, SamplingParams(**fields))


class RemoteModel:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, url: str, given: dict[str, Any], api_key: str | None = None) -> None:
        """`given` are fields of SamplingParams; the others are the server's to choose."""
        import httpx

        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._http = httpx.Client(timeout=httpx.Timeout(10, read=None), headers=headers)
        try:
            models = self._http.get(f"{self._base}/models").raise_for_status().json()
            model = models["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as e:
            if isinstance(e, httpx.HTTPStatusError) and e.response.status_code == 401:
                which = "needs an API key" if api_key is None else "does not know the API key"
                raise CallboardError(f"{self._base} {which}; pass --api-key or set CALLBOARD_API_KEY.") from e
            raise CallboardError(f"No OpenAI-compatible server answers at {self._base}: {e}; check --url.") from e
        self._fields = {"model": model, "stream": True, **given}

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        import httpx

        body = {**self._fields, "messages": messages}
        try:
            with self._http.stream("POST", f"{self._base}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise CallboardError(_error_message(response.text))
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == line or data == "[DONE]":
                        continue
                    yield from _texts(data)
        except httpx.HTTPError as e:
            raise CallboardError(f"The connection to {self._base} failed: {e or type(e).__name__}.") from e


def _texts(data: str) -> list[str]:
    """The texts of one event; raises CallboardError if it is an error, or none of a chat."""
    try:
        event = json.loads(data)
        if "error" not in event:
            return [str(choice["delta"].get("content") or "") for choice in event["choices"]]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CallboardError(f"The server sent an event that is none of a chat: {data[:200]}") from e
    raise CallboardError(_error_message(data))


def _error_message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered: {body[:200]}"
