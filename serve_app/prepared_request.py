"""An API request on its way through the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.core.types import Request
from runtime.text.stream import StopStrings
from serve_app.message_parser import MessageFormat
from serve_app.response_format import RequestedGrammar
from serve_app.responses import Echo, Guesses, usage


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """An API request, checked and tokenised: one engine request per choice, in the order of the choices' indices."""

    id: str
    chat: bool  # which endpoint's shape the answer has
    logprobs: bool
    requests: list[Request]
    stops: StopStrings | None  # of all choices
    num_choices: int  # of each prompt: request i is about prompt i // num_choices
    fingerprint: str  # of the model, its dtype and its numerics
    echoes: list[Echo]  # of each prompt; empty unless echo was asked for
    prompt_logprobs: int | None  # alternatives to show at each position of a prompt
    return_token_ids: bool
    return_draft_spans: bool
    continuous_usage: bool  # in every chunk of a stream that shows its usage
    speculates: bool  # a draft may guess: the usage tells how well
    ignored_fields: list[str]
    message_format: MessageFormat | None  # how a chat's text is read; None: all of it is content
    structure: RequestedGrammar | None  # what the output must match; the requests get its grammar when they run

    def headers(self) -> dict[str, str]:
        """What a client should know that the answer's shape has no place for."""
        return {"x-callboard-ignored-fields": ", ".join(self.ignored_fields)} if self.ignored_fields else {}

    def echo(self, index: int) -> Echo | None:
        """What choice `index` begins with."""
        return self.echoes[index // self.num_choices] if self.echoes else None

    def usage(self, num_output: list[int], num_cached: list[int], guesses: Guesses) -> dict[str, Any]:
        """OpenAI's usage object, from what each choice took and the guesses at all of them. A prompt counts once,
        whatever its number of choices, and what is cached of it is what the first of them found."""
        n = self.num_choices
        num_prompt = sum(request.prompt_len for request in self.requests[::n])
        cached = sum(min(num_cached[at : at + n]) for at in range(0, len(num_cached), n))
        return usage(num_prompt, sum(num_output), cached, guesses if self.speculates else None)
