"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, cast

from pydantic import Discriminator, Field, Tag

from runtime.output.fields import invalid
from serve_app.protocol.dialects import COMPLETIONS
from serve_app.protocol.sampling import SamplingFields
from serve_app.protocol.shapes import RequestModel, TokenIds, or_default


class TokensPrompt(RequestModel):
    """vLLM's form of a prompt in token ids."""

    prompt_token_ids: TokenIds


def _prompt_shape(value: Any) -> str | None:
    match value:
        case str():
            return "<text>"
        case [str(), *_]:
            return "<texts>"
        case [list(), *_]:
            return "<token id lists>"
        case dict() | TokensPrompt():
            return "<object>"
        case [dict(), *_] | [TokensPrompt(), *_]:
            return "<objects>"
        case [*_]:
            return "<token ids>"
    return None


PromptValue = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<token ids>")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("<token id lists>")]
    | Annotated[TokensPrompt, Tag("<object>")]
    | Annotated[list[TokensPrompt], Field(fail_fast=True), Tag("<objects>")],
    Discriminator(
        _prompt_shape,
        custom_error_type="prompt_shape",
        custom_error_message="it should be a text, a list of texts, a list of token ids or a list of such lists",
    ),
]


def prompts_of(prompt: PromptValue) -> Sequence[str | list[int]]:
    """The prompts as a list, each a text or token ids."""
    is_one = isinstance(prompt, str | TokensPrompt) or (bool(prompt) and isinstance(prompt[0], int))
    each = cast(Sequence[str | list[int] | TokensPrompt], [prompt] if is_one else prompt)
    return [one.prompt_token_ids if isinstance(one, TokensPrompt) else one for one in each]


_Length = Annotated[int, Field(ge=1, lt=1 << 31)]
_Lengths = Annotated[
    Annotated[_Length, Tag("<number>")] | Annotated[list[_Length], Field(fail_fast=True), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<number>"),
]


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    dialect = COMPLETIONS
    token_ids_field: ClassVar[str | None] = "prompt"

    prompt: PromptValue
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # the same, and counts before it
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None  # what comes after the completion
    # An extension, with prompt scores: where the output begins, one for all prompts or one for each.
    prompt_len: _Lengths | None = None
    best_of: int | None = None

    return_draft_spans: bool | None = None  # an extension: which of the text a draft had guessed

    def max_output(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None, None if self.max_output() != 0 else 0]
        return max((n for n in wanted if n is not None), default=None)

    def num_prompts(self) -> int:
        return len(self.prompts())

    def shows_more_than_text(self) -> bool:
        return super().shows_more_than_text() or bool(self.return_draft_spans)

    def check(self) -> None:
        super().check()
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            problem = "cannot be combined with echo or truncate_prompt_tokens, since marks stand around the prompt"
            raise invalid("suffix", problem)
        if self.prompt_len is not None:
            self._check_prompt_len(self.prompt_len)
        if self.best_of is not None and self.best_of != or_default(self.n, 1):
            raise invalid("best_of", f"is {self.best_of}, but only the value of n is supported; leave it out")

    def _check_prompt_len(self, given: int | list[int]) -> None:
        if self.num_prompt_logprobs() is None:
            problem = "is only allowed where the prompt is scored; send prompt_logprobs, or echo with logprobs"
            raise invalid("prompt_len", problem)
        if self.suffix or self.truncate_prompt_tokens is not None:
            raise invalid(
                "prompt_len", "cannot be combined with suffix or truncate_prompt_tokens, which change prompts"
            )
        if isinstance(given, list) and len(given) != self.num_prompts():
            problem = f"is a list of length {len(given)}, and the number of prompts is {self.num_prompts()}"
            raise invalid("prompt_len", f"{problem}; send one number, or one for each prompt")

    def prompt_lengths(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return where the outputs in these prompts begin; empty without `prompt_len`. Raises FieldError."""
        if self.prompt_len is None:
            return []
        lengths = self.prompt_len if isinstance(self.prompt_len, list) else [self.prompt_len] * len(prompts)
        for length, prompt in zip(lengths, prompts, strict=True):
            if length > len(prompt):
                raise invalid("prompt_len", f"is {length}, but its prompt has {len(prompt)} tokens; send at most these")
        return lengths

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list, each a text or token ids."""
        return prompts_of(self.prompt)
