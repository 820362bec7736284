"""An API request on its way through the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from runtime.output.chat_prompt import ChatPrompter
from runtime.output.message_parser import MessageFormat
from runtime.output.processor import Delta
from runtime.output.response_format import RequestedGrammar
from runtime.spec.config import ModelInfo
from runtime.spec.types import Request
from runtime.text.stream import StopStrings
from runtime.text.tokenizer import Tokenizer
from serve_app.protocol.answers import ChoiceUsage, usage
from serve_app.protocol.prompt_ids import prompt_ids
from serve_app.protocol.sampling import SamplingFields

R = TypeVar("R", bound=SamplingFields)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as the endpoints need it."""

    name: str  # that clients use
    tokenizer: Tokenizer
    chats: ChatPrompter | None  # None: it has no chat template
    info: ModelInfo
    draft: str | None  # what guesses for it; None if nothing does
    adapter: str = ""  # digest of the adapter that this name means; "": it means the model itself

    @property
    def speculates(self) -> bool:
        """True if usage tells how well guesses do."""
        return self.draft is not None

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: weights and numerics. With the same one, a seed gives the same answer."""
        own = f"_{self.adapter[:16]}" if self.adapter else ""
        return f"fp_{self.info.fingerprint[:16]}{own}"

    def encode(self, request: SamplingFields, text: str, special: bool, where: str) -> list[int]:
        """The token ids of the text of the field `where`; raises ApiError if they are clearly too many."""
        special = special if request.add_special_tokens is None else request.add_special_tokens
        kept: Literal["end"] | None = None if request.truncate_prompt_tokens is None else "end"
        return prompt_ids(self.tokenizer, text, special, self.info.max_model_len, where, kept)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt at the head of its completion."""

    text: str
    offsets: list[int]  # where the text of each of its tokens begins; empty unless log-probabilities are asked for


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one request, and what holds for the output of each."""

    token_ids: list[list[int]]
    where: str  # the field that they come from
    grammar: RequestedGrammar | None  # that the output must match, counted from where the prompt ends
    message_format: MessageFormat | None = None  # how the output is read; None: all of it is content
    prediction: tuple[int, ...] = ()  # the output that a client expects
    ignored_fields: tuple[str, ...] = ()  # that mean nothing to this model
    echoes: list[Echo] = field(default_factory=list)  # of each prompt; empty unless echo was asked for

    def path(self, index: int) -> str:
        """The path of one prompt in the request."""
        return self.where if len(self.token_ids) == 1 else f"{self.where}.{index}"


@dataclass(frozen=True, slots=True)
class PreparedRequest(Generic[R]):
    """An API request, checked and tokenised: one engine request per choice, in the order of the choices' indices."""

    id: str
    owner: str  # who asks: nobody else can abort it, or find its answer
    request: R  # what the client asked for
    model: ServedModel
    prompts: Prompts
    requests: list[Request]  # without their grammar, which they get when they run
    stops: StopStrings | None  # of all choices
    ignored_fields: list[str]
    on_delta: Callable[[Delta], None] | None = None  # is told of each

    @property
    def num_choices(self) -> int:
        """Choices of each prompt: engine request i is about prompt i // num_choices."""
        return self.request.n or 1

    @property
    def seed(self) -> int | list[int]:
        """The `seed` of a request that gets the same answer: one number, or one for each prompt."""
        seeds = [request.seed for request in self.requests[:: self.num_choices]]
        return seeds[0] if len(set(seeds)) == 1 else seeds

    def headers(self) -> dict[str, str]:
        """Headers for facts that the answer's shape may have no place for."""
        headers = {"x-callboard-system-fingerprint": self.model.fingerprint}
        if isinstance(seed := self.seed, int):  # of several there may be too many; choices have their own
            headers["x-callboard-seed"] = str(seed)
        if self.ignored_fields:
            headers["x-callboard-ignored-fields"] = ", ".join(self.ignored_fields)
        return headers

    def echo(self, index: int) -> Echo | None:
        """The head of choice `index`."""
        return self.prompts.echoes[index // self.num_choices] if self.prompts.echoes else None

    def usage(self, choices: Sequence[ChoiceUsage]) -> dict[str, Any]:
        """OpenAI's usage object. A prompt counts once, whatever its number of choices, and what is cached of it is what
        the first of them found."""
        n, num_prompt = self.num_choices, sum(map(len, self.prompts.token_ids))
        num_cached = sum(min(c.num_cached for c in choices[at : at + n]) for at in range(0, len(choices), n))
        return usage(num_prompt, num_cached, choices, self.model.speculates)
