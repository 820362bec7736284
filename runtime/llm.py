"""Offline Python: a model in this process, without Ray and without HTTP.

llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct")
for answer in llm.generate(["Once upon a time", "def fibonacci(n):"], SamplingParams(max_tokens=64)):
    print(answer.text)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from runtime.core.config import DEFAULT_MODEL, EngineConfig
from runtime.core.draft import LocalWire
from runtime.core.draft_client import DraftClient, speculation_of
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.core.types import CallboardError, FinishReason, Request, SamplingParams, TokenLogprobs
from runtime.loading.resolve import resolve
from runtime.text.chat import ChatTemplate, load_tokenizer
from runtime.text.sampling_defaults import SamplingDefaults
from runtime.text.stream import TextStream
from runtime.text.tokenizer import Tokenizer

_LONG_BATCH = 8  # prompts from which on a progress bar helps

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One finished answer."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    stop: str | int | None = None  # the stop string or stop token id that ended it
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # entry i is about prompt token i + 1
    num_cached: int = 0  # prompt tokens served from the prefix cache


class _Job:
    """A completion that is being made."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams) -> None:
        self.completion = Completion(prompt)
        self.text = TextStream(
            tokenizer, params.stop, params.include_stop_str_in_output, params.skip_special_tokens, prompt[-8:]
        )


class LLM:
    """One engine and one runner in this process. Keyword arguments are EngineConfig's fields; not thread-safe."""

    def __init__(self, model: str = DEFAULT_MODEL, **config: Any) -> None:
        """Fetches the model if need be and loads it. Raises CallboardError with one sentence if that fails."""
        from runtime.worker.draft_runner import load_draft  # torch loads here, not with the module
        from runtime.worker.runner import ModelRunner
        from runtime.worker.sources import CheckpointSource

        self.config = EngineConfig(model=model, **config)
        if self.config.tensor_parallel_size != 1:
            raise CallboardError("LLM runs in one process; for tensor_parallel_size above 1 use `callboard serve`.")
        path = resolve(model, self.config.revision)
        self.tokenizer = load_tokenizer(path, self.config.chat_template)
        self.defaults = SamplingDefaults.load(path, self.config.generation_config)
        draft = load_draft(self.config) if self.config.has_draft_model else None  # it takes less memory than is free
        self.runner = ModelRunner(self.config, CheckpointSource(path))
        speculation = speculation_of(self.config, self.runner.info, time.monotonic)
        self.engine = EngineCore(self.config, self.runner.info, InProcess(self.runner), speculation)
        if draft is not None and speculation is not None and isinstance(speculation.drafter, DraftClient):
            speculation.drafter.attach(LocalWire(draft), draft.scheduler.info.step_us)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Complete texts or lists of token ids, all together, in the order given.

        `params` are one for all or one each; without them, the model's own (`defaults.params(max_tokens=64)` changes
        some). Without a seed each prompt gets a random one. `progress` shows a bar; by default from 8 prompts on."""
        batch = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        ids = [self._encode(p) for p in batch]
        each = [params or self.defaults.params()] * len(ids) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(ids):
            raise CallboardError(f"There are {len(ids)} prompts and {len(each)} SamplingParams; send one or as many.")
        show = len(ids) >= _LONG_BATCH if progress is None else progress
        return self._run(ids, each, show)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answer one conversation or several, with the model's own chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        return self.generate([self.chat_prompt(c) for c in conversations], params, progress=progress)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to where the model's answer begins."""
        prompt = ChatTemplate.of(self.tokenizer).render(messages)
        return self.tokenizer.encode(prompt, add_special_tokens=False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece; closing the iterator ends the request."""
        job = self._add(self._encode(prompt), params or self.defaults.params())
        try:
            while not job.completion.finish_reason:
                before = len(job.completion.text)
                self._step()
                if text := job.completion.text[before:]:
                    yield text
        finally:
            if not job.completion.finish_reason:
                self._abort_all()

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], show: bool) -> list[Completion]:
        try:
            jobs = [self._add(ids, p) for ids, p in zip(prompts, params, strict=True)]
            with tqdm(total=len(jobs), desc="completions", disable=None if show else True) as bar:
                while self.engine.has_work:
                    bar.update(self._step())
        except BaseException:  # also Ctrl-C: nothing of this call may run on in the next
            self._abort_all()
            raise
        return [job.completion for job in jobs]

    def _add(self, prompt: list[int], params: SamplingParams) -> _Job:
        self._num_requests += 1
        seed = secrets.randbits(63) if params.seed is None else params.seed
        job = _Job(self.tokenizer, prompt, params)
        self.engine.add(Request(str(self._num_requests), list(prompt), len(prompt), params, seed), job)
        return job

    def _abort_all(self) -> None:
        for request_id in list(self.engine.scheduler.requests):
            self.engine.abort(request_id)
        while self.engine.has_work:
            self.engine.step()

    def _step(self) -> int:
        """One step; returns how many completions it finished."""
        output = self.engine.step()
        self.engine.submit()  # the next steps compute while this one's tokens become text
        if output is None:
            return 0
        num_finished = 0
        stopped = {state for state, reason in output.finished if reason is FinishReason.STOP}
        for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
            job: _Job = state.owner
            done = job.completion
            done.token_ids.append(token)
            done.num_cached = state.num_cached or 0
            if i in output.logprobs:
                done.logprobs.append(output.logprobs[i])
            if state not in stopped or state.params.include_stop_str_in_output:  # the id that ends it is not text
                done.text += job.text.push([token])
            if job.text.stopped is not None:
                done.finish_reason, done.stop = FinishReason.STOP, job.text.stopped
                self.engine.abort(state.request.request_id)
                num_finished += 1
        for state, scores in output.prompt_logprobs:
            done = state.owner.completion
            done.prompt_logprobs = list(scores.of(done.prompt_token_ids[1:]))
        for state, reason in output.finished:
            job = state.owner
            if job.completion.finish_reason:
                continue  # a stop string ended it in this very step
            job.completion.finish_reason = reason
            job.completion.text += job.text.finish()
            if reason is FinishReason.STOP and state.tokens[-1] in state.params.stop_token_ids:
                job.completion.stop = state.tokens[-1]
            num_finished += 1
        return num_finished


def _is_ids(prompts: Any) -> bool:
    return bool(prompts) and isinstance(prompts[0], int)
