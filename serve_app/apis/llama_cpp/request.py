"""The requests of POST /completion and POST /infill, and their translation to completions, which check the values."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from runtime.output.fields import invalid, read_options, shown
from serve_app.apis.completions.request import CompletionRequest
from serve_app.protocol.dialects import LLAMA_CPP
from serve_app.protocol.sampling import MAX_BIASES
from serve_app.protocol.shapes import RequestModel, only

_NO_IMAGES = only(None, [], remedy="send images to /v1/chat/completions")
_RANDOM_SEEDS = (-1, (1 << 32) - 1)  # the second is the first without a sign
_MILLISECONDS = Annotated[int, Field(ge=-1, lt=1 << 31)]


class OtherFile(RequestModel):
    """A part of another file."""

    text: str
    filename: str = ""


class Gap(RequestModel):
    """The place of a POST /infill: what surrounds the completion, which goes on after `prompt`."""

    before: str
    after: str
    other_files: list[OtherFile]


class LlamaCompletion(CompletionRequest):
    """The completion of either route."""

    dialect = LLAMA_CPP

    gap: Gap | None = None  # None for POST /completion
    computes_prompt_only: bool = False  # returns no text
    return_tokens: bool = False
    response_fields: list[str] | None = None
    t_max_predict_ms: int = 0
    n_indent: int = 0


class _PromptObject(RequestModel):
    prompt_string: str
    multimodal_data: Annotated[Any, _NO_IMAGES] = None


class LlamaCompletionRequest(RequestModel):
    """POST /completion. Other fields of completions are allowed too."""

    model_config = ConfigDict(extra="allow")  # the completion reads, refuses or reports the other fields
    token_ids_field: ClassVar[str | None] = "prompt"

    model: str | None = None
    prompt: Any
    n_predict: Annotated[int, Field(ge=-2, lt=1 << 31)] | None = None  # the rest of the context if below 0
    n_cmpl: int | None = None
    stream: bool | None = None
    stop: Any = None
    seed: int | None = None  # -1 is a random one
    temperature: float | None = None  # negative values are 0
    repeat_penalty: float | None = None
    logit_bias: Any = None  # pairs (id, number or false), or OpenAI's object
    n_probs: Annotated[int, Field(ge=0)] | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool = False
    response_fields: Annotated[list[str], Field(max_length=256)] | None = None
    t_max_predict_ms: _MILLISECONDS | None = None
    n_indent: Annotated[int, Field(ge=0)] | None = None

    def as_request(self) -> LlamaCompletion:
        """Return the equivalent completion; raises FieldError."""
        most = self.n_predict
        own: dict[str, Any] = {
            **self._place(),
            "model": self.model,
            "stream": bool(self.stream),
            "stop": self.stop or None,
            "seed": None if self.seed in _RANDOM_SEEDS else self.seed,
            "temperature": None if self.temperature is None else max(self.temperature, 0.0),
            "repetition_penalty": self.repeat_penalty,
            "logit_bias": _biases(self.logit_bias),
            "logprobs": self.n_probs or None,
            "computes_prompt_only": most == 0,
            "return_tokens": self.return_tokens,
            "response_fields": self.response_fields,
            "t_max_predict_ms": self.t_max_predict_ms,
            "n_indent": self.n_indent,
        }
        fields = {name: value for name, value in (self.model_extra or {}).items() if name != "gap"}
        fields |= {name: value for name, value in own.items() if value is not None}
        if most is not None:
            fields["max_tokens"] = None if most < 0 else max(most, 1)
        if self.n_cmpl is not None:
            fields["n"] = self.n_cmpl
        if self.json_schema is not None:
            schema = {"name": "it", "schema": self.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        request = read_options(LlamaCompletion, fields)
        request.check()
        return request

    def _place(self) -> dict[str, Any]:
        many = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        texts = [read_options(_PromptObject, p).prompt_string if _is_object(p) else p for p in many]
        return {"prompt": texts if isinstance(self.prompt, list) else texts[0]}


class LlamaInfillRequest(LlamaCompletionRequest):
    """POST /infill: the text between two texts."""

    prompt: str = ""  # how the text between them begins
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[OtherFile], Field(max_length=1024, fail_fast=True)] | None = None

    def _place(self) -> dict[str, Any]:
        gap = Gap(before=self.input_prefix, after=self.input_suffix, other_files=self.input_extra or [])
        return {"prompt": self.prompt, "gap": gap}


def _is_object(prompt: object) -> bool:
    return isinstance(prompt, dict) and "prompt_string" in prompt


def _biases(value: Any) -> Any:
    """Return OpenAI's object for a list of pairs."""
    if not isinstance(value, list):
        return value
    found: dict[str, Any] = {}
    for at, pair in enumerate(value[: MAX_BIASES + 1]):
        match pair:
            case [int(token), False]:
                found[str(token)] = -100
            case [int(token), int(bias) | float(bias)] if not isinstance(bias, bool):
                found[str(token)] = bias
            case _:
                problem = f"is {shown(pair)}; it should be a token id with a number or false"
                raise invalid(f"logit_bias.{at}", problem)
    return found
