"""Offline Python: a model in this process, without Ray and without HTTP.

from callboard import LLM, SamplingParams

llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct")
for answer in llm.generate(["Once upon a time", "def fibonacci(n):"], SamplingParams(max_tokens=64)):
    print(answer.text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any, TypeVar, cast

from tqdm import tqdm

from runtime.assembly.engine import build_engine, draft_client_of, speculation_of
from runtime.assembly.outputs import outputs_by_request
from runtime.base.config import DEFAULT_MODEL, EngineConfig
from runtime.base.images import ImageSpan
from runtime.base.model.pooling import POOLED, required_pooling
from runtime.base.plain_values import integer, integers, is_integer
from runtime.base.reports import Experts, Vector, one_of, prompt_entries
from runtime.base.types import CallboardError, FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from runtime.core.executor import InProcess
from runtime.core.requests import requests_of
from runtime.features.adapter_table import AdapterTable
from runtime.loading.adapter_files import read_adapter
from runtime.loading.resolve import resolve, resolve_adapter, with_known_draft
from runtime.output.chat_prompt import ChatPrompter
from runtime.output.fields import invalid, read_options
from runtime.output.image_forms import conversations_in, processor_for, with_images, with_marks
from runtime.output.message_parser import MessageFormat
from runtime.output.options import ChatOptions, OutputOptions
from runtime.output.processor import Delta, OutputProcessor
from runtime.output.response_format import RequestedGrammar
from runtime.output.score_prompt import PairPrompter, Part, encoder_of
from runtime.output.vectors import embedding, scores, texts_of
from runtime.speculation.draft import LocalWire
from runtime.structured.grammar import compiled
from runtime.structured.pattern import GrammarError
from runtime.text.chat import load_tokenizer
from runtime.text.sampling_defaults import SamplingDefaults
from runtime.text.tool_calls import CallDelta

_compiled = lru_cache(maxsize=64)(compiled)  # a batch's prompts share their grammars
_LONG_BATCH = 8  # prompts from which on a progress bar helps
_PLAIN = OutputOptions()

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | Sequence[int]
_Prompt = tuple[list[int], MessageFormat | None, RequestedGrammar | None, tuple[ImageSpan, ...]]


@dataclass(slots=True)
class Completion:
    """One finished answer."""

    prompt_token_ids: list[int]
    text: str = ""  # a chat's content, or the text
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    stop: str | int | None = None  # the stop string or stop token id that ended it
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # entry i is about prompt token i + 1
    num_cached: int = 0  # prompt tokens served from the prefix cache
    reasoning: str = ""  # a chat's reasoning
    tool_calls: Sequence[CallDelta] = ()  # a chat's calls
    error: str = ""  # one sentence, if it failed
    seed: int = 0  # the seed that it was drawn with
    # Its computed tokens' experts, int16 little-endian [num_tokens, layers, top_k] (ModelInfo), if requested.
    routed_experts: bytes | None = None


class _Choice:
    """A completion that is being made."""

    def __init__(self, request: Request, processor: OutputProcessor) -> None:
        self.request, self._processor = request, processor
        self.sum = Delta(0)
        self.reason = FinishReason.NONE
        self.error = ""

    def take(self, output: RequestOutput) -> None:
        """Adds the output of a step."""
        new = self._processor.process(output)
        self.sum.add(new)
        ended_by_text = new.finish_reason is not None and not output.finish_reason
        self.reason, self.error = FinishReason.STOP if ended_by_text else output.finish_reason, output.error

    def completion(self) -> Completion:
        done = self.sum
        experts = one_of(done.reports, Experts)
        return Completion(
            self.request.token_ids,
            done.text,
            done.token_ids,
            self.reason,
            done.stop_reason,
            done.logprobs,
            list(prompt_entries(done.reports, self.request.token_ids)),
            done.num_cached,
            done.reasoning,
            done.calls,
            self.error,
            self.request.seed,
            None if experts is None else experts.ids,
        )


class _Vector:
    """The vector of a prompt that is being pooled."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.numbers = b""
        self.reason = FinishReason.NONE
        self.error = ""

    def take(self, output: RequestOutput) -> None:
        """Adds the output of a step."""
        if (vector := one_of(output.reports, Vector)) is not None:
            self.numbers = vector.numbers
        self.reason, self.error = output.finish_reason, output.error


_Owner = TypeVar("_Owner", _Choice, _Vector)  # owns a request


class LLM:
    """One engine and one runner in this process. Keyword arguments are EngineConfig's fields; not thread-safe."""

    def __init__(
        self, model: str = DEFAULT_MODEL, *, on_phase: Callable[[str], None] = lambda phase: None, **config: Any
    ) -> None:
        """Fetches the model if need be and loads it. Raises CallboardError with one sentence if that fails.

        `on_phase` is called as each phase of this begins."""
        on_phase("importing PyTorch")
        from runtime.assembly.draft import load_draft  # torch loads here, not with the module
        from runtime.assembly.runner import build_runner
        from runtime.worker.sources import CheckpointSource

        self.config = with_known_draft(EngineConfig(model=model, **config))
        if self.config.lora:
            raise CallboardError("lora names adapters for clients of a server; use load_adapter instead.")
        if self.config.tensor_parallel_size != 1:
            raise CallboardError("tensor_parallel_size must be 1: one process holds the whole model; leave it out.")
        on_phase("finding the model")
        path = resolve(model, self.config.revision)
        on_phase("reading the tokenizer")
        self.tokenizer = load_tokenizer(path, self.config)
        self.defaults = SamplingDefaults.load(path, self.config.generation_config, model)
        on_phase("reading the weights")
        self._draft = load_draft(self.config) if self.config.has_draft_model else None  # less memory than is free
        self.runner = build_runner(self.config, CheckpointSource(path))
        speculation = speculation_of(self.config, self.runner.info, time.monotonic)
        self.engine = build_engine(self.config, self.runner.info, InProcess(self.runner), speculation)
        self._attach_draft()
        self._in_step = False
        self._unwanted: list[str] = []  # requests to end before the next step
        self._names = map(str, count(1))
        self._chats = ChatPrompter(self.tokenizer) if self.tokenizer.chat_template is not None else None
        self._images = processor_for(self.runner.info.images, path, self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        adapter: str = "",
        prompt_len: int | Sequence[int] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete texts or token id lists as one batch, and return the completions in order.

        `params` are one for all or one each; default: the model's own (`defaults.params(max_tokens=64)` changes some).
        Without a seed each prompt gets a random one. `progress` shows a bar; default: from 8 prompts on. `adapter` is a
        result of `load_adapter`. `options` are fields of runtime.output.options.OutputOptions, as over HTTP. With `n`,
        one prompt's completions are adjacent. They match `response_format` or `structured_outputs`. `prompt_len` is
        where an output in the prompt begins, one for all or one each: `prompt_logprobs` scores it as it was sampled."""
        asked = read_options(OutputOptions, options)
        batch = self._encode_all(prompts, asked.requested_grammar())
        return self._run(batch, params, asked, progress, adapter, prompt_len)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        adapter: str = "",
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation or several, with the model's own chat template.

        A message's content may be a list with texts and pictures: {"type": "text", "text": "What is this?"} and
        {"type": "image", "image": X}. X is a path, a PIL image, a uint8 array, a data URL or a file's bytes.

        `options` are fields in runtime.output.options.ChatOptions, as over HTTP: the options of `generate`, and
        `tools`, `tool_choice`, `chat_template_kwargs` and others. Reasoning and tool calls are parsed from the text."""
        asked = read_options(ChatOptions, options)
        asked.check()
        chats = conversations_in(messages) or cast(Sequence[Sequence[Message]], [messages])
        return self._run([self._chat(c, asked) for c in chats], params, asked, progress, adapter)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return a conversation's token ids, up to where the model's answer begins."""
        return self._chat(messages, ChatOptions())[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, adapter: str = ""
    ) -> Generator[str, None, Completion]:
        """Yield the text of one completion in pieces, and return the completion. Closing the iterator ends the request.

        Several streams may be open at once, and other methods may be called between their pieces. Raises CallboardError
        if the request fails."""
        (choice,) = self._add((self._encode(prompt), None, None, ()), params or self.defaults.params(), _PLAIN, adapter)
        num_read = 0
        try:
            while not choice.reason or num_read < len(choice.sum.text):
                if num_read == len(choice.sum.text):
                    self._step()
                    continue
                text, num_read = choice.sum.text[num_read:], len(choice.sum.text)
                yield text
        finally:
            self._end([choice])
        if choice.error:
            raise CallboardError(choice.error)
        return choice.completion()

    def embed(
        self,
        texts: Prompt | Sequence[Prompt] | Sequence[Message] | Sequence[Sequence[Message]],
        dimensions: int | None = None,
        *,
        progress: bool | None = None,
        adapter: str = "",
        add_special_tokens: bool = False,
        **options: Any,
    ) -> list[list[float]]:
        """Return the vectors of texts, token id lists or conversations in order, as /v1/embeddings does.

        `dimensions` shortens each vector to this length, if the model is trained for that. A conversation has messages
        as in `chat`. `add_special_tokens` and `options` (ChatOptions) are for these."""
        pooling = required_pooling(self.runner.info.pooling)
        if pooling.num_labels:
            raise CallboardError("This model makes scores, not embeddings; use `score`.")
        dimensions = None if dimensions is None else integer(dimensions, "dimensions", 1)
        asked = read_options(ChatOptions, {"add_generation_prompt": False} | options)
        asked.check()
        chats = [self._chat(c, asked, add_special_tokens) for c in conversations_in(texts)]
        pooled = self._pool(chats or self._encode_all(cast(Sequence[Prompt], texts)), progress, adapter)
        return [embedding(p, pooling, dimensions).tolist() for p in pooled]

    def score(
        self,
        query: str,
        documents: str | Sequence[str],
        instruction: str | None = None,
        *,
        progress: bool | None = None,
        adapter: str = "",
    ) -> list[float]:
        """Return the relevance of each document to a query in order, as /v1/score does.

        This is a classifier's probability, or the cosine of two embeddings. Only some rerankers read `instruction`."""
        pooling = required_pooling(self.runner.info.pooling)
        if pooling.num_labels > 1:
            raise CallboardError(f"This model's classifier has {pooling.num_labels} labels; a score is of one label.")
        pairs = [(query, text) for text in ([documents] if isinstance(documents, str) else documents)]
        if pooling.num_labels:

            def encode(text: str, special: bool, part: Part) -> list[int]:
                return encoder_of(self.tokenizer, part)(text, special)

            prompter = PairPrompter(encode, pooling, instruction)
            prompts = [prompter.ids(query, text) for query, text in pairs]
        else:
            prompts = [self.tokenizer.encode_contents(text) for text in texts_of(pairs)]
        return scores(pairs, self._pool(self._encode_all(prompts), progress, adapter), pooling)

    def load_adapter(self, path: str) -> str:
        """Load the adapter (LoRA) in a folder that peft has written, and return its digest; `max_loras` limits them."""
        path = resolve_adapter(path)
        adapter, adapters = read_adapter(path), self.engine.extras[AdapterTable]
        if adapter.digest not in adapters.loaded:
            index = adapters.reserve(adapter.digest)
            try:
                self.runner.load_adapter(index, path, adapter.digest)
            except BaseException:
                adapters.release(adapter.digest)
                raise
            adapters.open(adapter.digest)
        return adapter.digest

    def unload_adapter(self, adapter: str) -> None:
        """Make room for another one; no stream may have it any more."""
        self.engine.extras[AdapterTable].release(adapter)

    def _encode_all(self, prompts: Prompt | Sequence[Prompt], grammar: RequestedGrammar | None = None) -> list[_Prompt]:
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and is_integer(prompts[0]))
        each = cast(Sequence[Prompt], [prompts] if is_one else prompts)
        return [(self._encode(prompt), None, grammar, ()) for prompt in each]

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else integers(prompt, "The prompt")

    def _chat(self, messages: Sequence[Message], options: ChatOptions, special: bool = False) -> _Prompt:
        if self._chats is None:
            raise CallboardError("This model has no chat template; use `generate` with a plain prompt.")
        messages, sources = with_marks(messages)
        prompt = self._chats.prompt(messages, options)
        ids, images = with_images(prompt.encode(prompt.source, special), sources, self._images)
        return ids, prompt.message_format, self._chats.grammar(options, prompt.message_format), images

    def _run(
        self,
        prompts: list[_Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        asked: OutputOptions,
        progress: bool | None,
        adapter: str,
        prompt_len: int | Sequence[int] | None = None,
    ) -> list[Completion]:
        each = list(params) if isinstance(params, Sequence) else [params or self.defaults.params()] * len(prompts)
        if len(each) != len(prompts):
            raise CallboardError(
                f"There are {len(prompts)} prompts and {len(each)} SamplingParams; send one or as many."
            )
        is_one = prompt_len is None or is_integer(prompt_len)
        lengths = [cast(int | None, prompt_len)] * len(prompts) if is_one else list(cast(Sequence[int], prompt_len))
        if (num := len(lengths)) != len(prompts):
            raise CallboardError(f"There are {len(prompts)} prompts, {num} prompt_len; send one or as many.")
        given = zip(prompts, each, lengths, strict=True)
        choices = (c for prompt, p, length in given for c in self._add(prompt, p, asked, adapter, length))
        done = self._finish(choices, "completions", len(prompts) >= _LONG_BATCH if progress is None else progress)
        return [choice.completion() for choice in done]

    def _pool(self, prompts: list[_Prompt], progress: bool | None, adapter: str) -> list[bytes]:
        """The pooled vector of each prompt."""
        vectors = (self._add_pooled(ids, images, adapter) for ids, _, _, images in prompts)
        done = self._finish(vectors, "prompts", len(prompts) >= _LONG_BATCH if progress is None else progress)
        for at, vector in enumerate(done):
            if vector.error:
                raise CallboardError(f"Prompt {at} has no vector: {vector.error}")
        return [vector.numbers for vector in done]

    def _add_pooled(self, ids: list[int], images: tuple[ImageSpan, ...], adapter: str) -> _Vector:
        vector = _Vector(Request(next(self._names), ids, len(ids), POOLED, adapter=adapter, images=images))
        self.engine.add(vector.request, vector)
        return vector

    def _finish(self, added: Iterable[_Owner], unit: str, show: bool) -> list[_Owner]:
        """Serve the requests that going through `added` adds, to their ends."""
        owners: list[_Owner] = []
        try:
            owners.extend(added)
            with tqdm(total=len(owners), desc=unit, disable=None if show else True) as bar:
                left: set[_Choice | _Vector] = set(owners)
                while left and self.engine.has_work:
                    num_before = len(left)
                    left.difference_update(self._step())
                    bar.update(num_before - len(left))
        finally:  # also after Ctrl-C: no request from this call continues in the next
            self._end(owners)
        return owners

    def _add(
        self, prompt: _Prompt, params: SamplingParams, asked: OutputOptions, adapter: str, prompt_len: int | None = None
    ) -> list[_Choice]:
        ids, form, grammar, images = prompt
        if form is not None and form.budget is not None:
            params = replace(params, thinking=form.budget)
        if grammar is not None:
            if not self.runner.info.eos_token_ids:
                raise invalid(grammar.field, "needs a model with an end-of-sequence token, and this one has none")
            try:
                params = replace(params, grammar=_compiled(grammar.spec))
            except GrammarError as e:
                raise invalid(grammar.field, str(e)) from e
        choices = []
        length = len(ids) if prompt_len is None else integer(prompt_len, "prompt_len", 1, len(ids))
        one = Request("", ids, length, params, adapter=adapter, images=images, cache_ttl_s=asked.cache_ttl_s())
        for request in requests_of(one, self._names, asked.n or 1):
            choices.append(_Choice(request, OutputProcessor(self.tokenizer, request, form=form)))
            self.engine.add(request, choices[-1])
        return choices

    def _end(self, owners: Sequence[_Choice | _Vector]) -> None:
        """End the requests of `owners` that have not ended, and wait for the steps in flight if no other is left.

        Within a step, when the garbage collector closes a stream, the next step ends them."""
        self._unwanted += [owner.request.request_id for owner in owners if not owner.reason]
        if self._in_step:
            return
        self._abort_unwanted()
        while self.engine.has_work and not self.engine.scheduler.requests:
            self._step()

    def _abort_unwanted(self) -> None:
        while self._unwanted:
            self.engine.abort(self._unwanted.pop())

    def _step(self) -> list[_Choice | _Vector]:
        """Run one step, and pass its output to the requests' owners. Returns the owners of ended requests.

        After an exception the engine is as new, and computes the live requests again (C8)."""
        self._abort_unwanted()
        self._in_step = True
        try:
            output = self.engine.step()
            self.engine.submit()  # the next steps compute while this one's tokens become text
        except BaseException:  # also Ctrl-C: the step may be half done
            self._recover()
            raise
        finally:
            self._in_step = False
        ended = []
        for state, new in outputs_by_request(output).items() if output is not None else ():
            owner: _Choice | _Vector = state.owner
            owner.take(new)
            if owner.reason and not new.finish_reason:  # its text ended it
                self.engine.abort(state.request.request_id)
            if owner.reason:
                ended.append(owner)
        return ended

    def _recover(self) -> None:
        executor = InProcess(self.runner)
        executor.reset()
        if (culprit := self.engine.lose()) is not None:
            culprit.state.owner.reason = FinishReason.ERROR
            culprit.state.owner.error = f"{culprit.num_losses} steps with this request ended with an exception."
        self.engine.recover(executor)
        if self._draft is not None:
            self._draft.recover()
            self._attach_draft()

    def _attach_draft(self) -> None:
        client = draft_client_of(self.engine)
        if self._draft is not None and client is not None:
            client.attach(LocalWire(self._draft), self._draft.scheduler.info.step_us)
