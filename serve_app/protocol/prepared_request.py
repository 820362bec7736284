"""An API request after its checks, and the model that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from runtime.base.images import ImageSpan
from runtime.base.model_info import ModelInfo
from runtime.base.types import Request
from runtime.media.processor import ImageProcessor
from runtime.output.chat_prompt import ChatPrompter
from runtime.output.message_parser import MessageFormat
from runtime.output.processor import Delta
from runtime.output.response_format import RequestedGrammar
from runtime.text.stream import StopStrings
from runtime.text.tokenizer import Tokenizer
from serve_app.protocol.answers import ChoiceUsage, usage
from serve_app.protocol.event_ids import EventIds
from serve_app.protocol.prompt_ids import prompt_ids
from serve_app.protocol.sampling import SamplingFields

R = TypeVar("R", bound=SamplingFields)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The facts about the model that endpoints need."""

    name: str  # the name that clients use
    tokenizer: Tokenizer
    chats: ChatPrompter | None  # None without a chat template
    info: ModelInfo
    draft: str | None  # the draft's name; None without speculation
    adapter: str = ""  # digest of the adapter with this name; empty for the model itself
    base: str = ""  # the first name of the model itself
    sleeps: bool = False  # its engine may end while it is idle
    image_processor: ImageProcessor | None = None  # None without image encoder in the model's description

    @property
    def images(self) -> ImageProcessor | None:
        """The processor of pictures; None if the model takes none. Before the first engine, it may have an encoder."""
        return self.image_processor if self.info.images is not None or not self.info.fingerprint else None

    @property
    def why_no_images(self) -> str:
        """The end of the sentence that refuses a picture."""
        return "" if self.image_processor is None else " here: its encoder is off (images) or not among its files"

    @property
    def speculates(self) -> bool:
        """True if usage reports draft tokens."""
        return self.draft is not None

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: weights and numerics. With the same one, a seed gives the same answer."""
        own = f"_{self.adapter[:16]}" if self.adapter else ""
        return f"fp_{self.info.fingerprint[:16]}{own}"

    def encode(
        self,
        request: SamplingFields,
        text: str,
        special: bool,
        where: str,
        encode: Callable[[str, bool], list[int]] | None = None,
    ) -> list[int]:
        """Return the token ids of field `where`'s text, by `encode` or, without it, by the tokenizer.

        Raises ApiError for a text far above the context."""
        special = special if request.add_special_tokens is None else request.add_special_tokens
        part: Literal["end"] | None = None if request.truncate_prompt_tokens is None else "end"
        return prompt_ids(encode or self.tokenizer.encode, text, special, self.info.max_model_len, where, part)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its completion repeats."""

    text: str
    offsets: list[int]  # start of each token's text; empty without log-probabilities


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one request, and the rules for their outputs."""

    token_ids: list[list[int]]
    where: str  # the field with the prompts
    grammar: RequestedGrammar | None  # what the output after the prompt must match
    message_format: MessageFormat | None = None  # the output's format; None if all is content
    prediction: tuple[int, ...] = ()  # the output that the client expects
    ignored_fields: tuple[str, ...] = ()  # fields without an effect on this model
    echoes: list[Echo] = field(default_factory=list)  # each prompt's echo; empty without echo
    # lengths of prompts alone, before their outputs; empty without outputs
    lengths: list[int] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = ()  # further ids that end an output
    images: tuple[ImageSpan, ...] = ()  # images in the prompt, which is the only one
    cut: Callable[[Delta], None] | None = None  # may shorten a delta and end its choice

    def path(self, index: int) -> str:
        """Return the path of one prompt in the request."""
        return self.where if len(self.token_ids) == 1 else f"{self.where}.{index}"


@dataclass(frozen=True, slots=True)
class PreparedRequest(Generic[R]):
    """An API request, checked and tokenised: one engine request per choice, in the order of the choices' indices."""

    id: str
    owner: str  # the only one that can abort it or read its stored answer
    request: R
    model: ServedModel
    prompts: Prompts
    requests: list[Request]  # without their grammar, which is added when they run
    stops: StopStrings | None  # all choices' stop strings
    ignored_fields: list[str]
    keep_s: float | None = None  # idle time after it until the model sleeps; None for the server's own
    keeps_aborted: bool = False  # an aborted choice ends with its tokens so far, and not with an error
    event_ids: EventIds | None = None  # its stream's ids
    on_delta: Callable[[Delta], None] | None = None  # called with each delta

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that gives tokens of the answer their texts; None for an answer without text."""
        return None if self.request.detokenize is False else self.model.tokenizer

    @property
    def num_choices(self) -> int:
        """Choices of each prompt: engine request i belongs to prompt i // num_choices."""
        return self.request.n or 1

    @property
    def seed(self) -> int | list[int]:
        """The `seed` that reproduces the answer: one number, or one for each prompt."""
        seeds = [request.seed for request in self.requests[:: self.num_choices]]
        return seeds[0] if len(set(seeds)) == 1 else seeds

    def headers(self) -> dict[str, str]:
        """Return headers with facts that some answers omit."""
        headers = {"x-callboard-system-fingerprint": self.model.fingerprint}
        if isinstance(seed := self.seed, int):  # several may be too many for a header; choices have theirs
            headers["x-callboard-seed"] = str(seed)
        if self.ignored_fields:
            headers["x-callboard-ignored-fields"] = ", ".join(self.ignored_fields)
        return headers

    def echo(self, index: int) -> Echo | None:
        """Return the repeated prompt of choice `index`."""
        return self.prompts.echoes[index // self.num_choices] if self.prompts.echoes else None

    def usage(self, choices: Sequence[ChoiceUsage]) -> dict[str, Any]:
        """Return OpenAI's usage object. A prompt counts once for all its choices, with the fewest cached tokens."""
        n, num_prompt = self.num_choices, sum(map(len, self.prompts.token_ids))
        cached = {at: min(c.num_cached for c in choices[at : at + n]) for at in range(0, len(choices), n)}
        return usage(num_prompt, sum(cached.values()), self.prompt_details(cached), choices, self.model.speculates)

    def prompt_details(self, cached: dict[int, int]) -> dict[str, int]:
        """Return further counts of prompt tokens, for engine requests by their cached tokens."""
        return {
            "image_tokens": sum(map(self.num_image_tokens, cached)),
            "cache_write_tokens": sum(self.num_written(at, num_cached) for at, num_cached in cached.items()),
        }

    def num_written(self, index: int, num_cached: int) -> int:
        """Return the tokens of a prompt with cache hints that its request adds to the cache: those in full blocks."""
        request, size = self.requests[index], self.model.info.block_size
        return max(0, request.prompt_len // size * size - num_cached) if request.cache_ttl_s else 0

    def num_image_tokens(self, index: int) -> int:
        """Return the prompt tokens of engine request `index` that have an image's embedding."""
        request, info = self.requests[index], self.model.info.images
        if info is None:
            return 0
        return sum(list(request.token_ids[span.begin : span.end]).count(info.token_id) for span in request.images)
