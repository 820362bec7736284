"""POST /v1/completions: texts or token ids, continued."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from runtime.base.reports import TokenLogprobs, Verified, all_of, prompt_entries
from runtime.output.fields import invalid
from runtime.output.processor import Delta
from runtime.text.stream import TextStream
from runtime.text.tokenizer import Tokenizer
from serve_app.apis.completions.answers import TextCompletion
from serve_app.apis.completions.fill_in_middle import between, end_ids
from serve_app.apis.completions.request import CompletionRequest
from serve_app.protocol.answers import finite, listed, token_id_text
from serve_app.protocol.operation import GENERATION, Operation
from serve_app.protocol.prepared_request import Echo, PreparedRequest, Prompts, ServedModel
from serve_app.protocol.prompt_ids import prompt_ids
from serve_app.protocol.sampling import MAX_CHOICES
from serve_app.protocol.sse import ChoiceRenderer, ChunkStream, EventStream
from serve_app.service.endpoint import Endpoint, answer_with, of_prompt

_KIND = "text_completion"


class CompletionsEndpoint(Endpoint[CompletionRequest]):
    """Texts or token ids in, text out."""

    path, request_type, id_prefix, default_max_tokens = "/v1/completions", CompletionRequest, "cmpl-", 16
    operation = Operation("Complete texts", TextCompletion, (CompletionRequest,), GENERATION, streams=True)
    keeps_aborted = True

    def prompts(self, request: CompletionRequest, model: ServedModel) -> Prompts:
        given, n = request.prompts(), request.n or 1
        if len(given) * n > MAX_CHOICES:
            raise invalid("prompt", f"has {len(given)} prompts for {n} choices each; at most {MAX_CHOICES} are allowed")
        prompts = []
        for at, prompt in enumerate(given):
            where = "prompt" if len(given) == 1 else f"prompt.{at}"
            if request.suffix:
                ids = _around(prompt, request.suffix, request, model, where)
            else:
                ids = prompt if isinstance(prompt, list) else model.encode(request, prompt, True, where)
            if not ids:
                raise invalid(where, "is empty; send at least one token")
            prompts.append(self.truncated(request, ids, model))
        echoes = _echoes(request, prompts, model.tokenizer) if request.echo else []
        lengths = request.prompt_lengths(prompts)
        stops = end_ids(model.tokenizer) if request.suffix and not request.ignore_eos else ()
        return Prompts(
            prompts, "prompt", request.requested_grammar(), echoes=echoes, lengths=lengths, stop_token_ids=stops
        )

    def answer(self, prepared: PreparedRequest[CompletionRequest], choices: list[Delta]) -> bytes:
        rendered = [
            {"index": choice.index, "text": choice.text}
            | CompletionRenderer(prepared, choice.index).rest(choice)
            | of_prompt(prepared, choice)
            for choice in choices
        ]
        return answer_with(prepared, _KIND, choices, rendered)

    def stream(self, prepared: PreparedRequest[CompletionRequest], include_usage: bool) -> EventStream:
        renderers = [CompletionRenderer(prepared, i) for i in range(len(prepared.requests))]
        return ChunkStream(prepared, _KIND, renderers, include_usage)


COMPLETIONS = CompletionsEndpoint()


class CompletionRenderer(ChoiceRenderer):
    """Renders one completion."""

    _prepared: PreparedRequest[CompletionRequest]

    def __init__(self, prepared: PreparedRequest[CompletionRequest], index: int) -> None:
        super().__init__(prepared, index)
        self._echo = prepared.echo(index)  # None after it was rendered
        self._begin = 0 if self._echo is None else len(self._echo.text)  # where the output begins in the choice's text
        self._decoded = self._shown = 0  # characters in the output, and in the choice's text
        self._waiting_spans: list[tuple[int, int]] = []
        self._has_told_prompt = False

    def rest(self, delta: Delta) -> dict[str, Any]:
        rest = super().rest(delta)
        if self._prepared.request.shows_prompt_ids and not self._has_told_prompt:
            rest["prompt_token_ids"], self._has_told_prompt = self._prepared.requests[self._index].token_ids, True
        if self._prepared.request.return_draft_spans:
            rest["draft_spans"] = self._draft_spans(delta)
        self._decoded = delta.ends[-1] if delta.ends else self._decoded
        return rest

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return the log-probabilities, or None without tokens.

        `text_offset` counts the whole characters before a token, including any that a stop string cuts off."""
        request = self._prepared.request
        if request.logprobs is None or (self._echo is None and not delta.logprobs):
            return None
        logprobs, offsets = delta.logprobs, []
        if self._echo is not None:
            prompt = self._prepared.requests[self._index].token_ids
            scored = (lp._replace(top=lp.top[: request.logprobs]) for lp in prompt_entries(delta.reports, prompt))
            logprobs = [TokenLogprobs(prompt[0], math.nan, 0, ()), *scored, *logprobs]
            offsets, self._echo = list(self._echo.offsets), None
        offsets += [self._begin + end for end in (self._decoded, *delta.ends[:-1])] if delta.logprobs else []
        text_of_id = partial(_token_text, tokenizer=self._prepared.model.tokenizer)
        as_ids = request.return_tokens_as_token_ids or not request.detokenize
        text: Callable[[int], str] = token_id_text if as_ids else text_of_id
        found = {
            "tokens": [text(lp.token_id) for lp in logprobs],
            # rank 0 for the first token
            "token_logprobs": [finite(lp.logprob) if lp.rank else None for lp in logprobs],
            "top_logprobs": listed(logprobs, lambda lp: _top(lp, text) if lp.rank else None),
            "text_offset": offsets,
        }
        if request.sampling_logprobs:
            drawn = (lp.sampling_logprob for lp in logprobs)
            found["sampling_logprobs"] = [None if value is None else finite(value) for value in drawn]
        return found

    def _draft_spans(self, delta: Delta) -> list[tuple[int, int]]:
        """Return the parts of the text from accepted draft tokens, as [start, end) in the choice's characters.

        A character belongs to its last token. Text that the stream holds back (runtime.text.stream) keeps its spans."""
        ends = [self._begin + end for end in (self._decoded, *delta.ends)]
        self._shown += len(delta.text)
        accepted = ((v.at, v.at + v.num_accepted) for v in all_of(delta.reports, Verified))
        spans = self._waiting_spans + [(ends[start], ends[end]) for start, end in accepted]
        self._waiting_spans = [(max(start, self._shown), end) for start, end in spans if end > self._shown]
        return [(start, min(end, self._shown)) for start, end in spans if start < min(end, self._shown)]


def _around(
    prompt: str | list[int], suffix: str, request: CompletionRequest, model: ServedModel, where: str
) -> list[int]:
    """Return the prompt of a completion between `prompt` and `suffix`."""
    encoded = partial(prompt_ids, model.tokenizer.encode, add_special_tokens=False, limit=model.info.max_model_len)
    before, beginning = prompt, list[int]()
    if isinstance(before, str):
        before = encoded(before, where=where)
        beginning = [] if request.add_special_tokens is False else model.tokenizer.encode("")
    return beginning + between(model.tokenizer, before, encoded(suffix, where="suffix"))


def _echoes(request: CompletionRequest, prompts: list[list[int]], tokenizer: Tokenizer) -> list[Echo]:
    wants_offsets = request.logprobs is not None
    echoes = []
    for given, ids in zip(request.prompts(), prompts, strict=True):
        if not request.detokenize:
            echoes.append(Echo("", [0] * len(ids)))
            continue
        if isinstance(given, str) and request.truncate_prompt_tokens is None:
            special = request.add_special_tokens is not False
            echoes.append(Echo(given, tokenizer.offsets(given, special) if wants_offsets else []))
            continue
        # A character that the prompt leaves incomplete belongs to the output.
        text, ends = TextStream(tokenizer, skip_special_tokens=request.skip_special_tokens).push(ids)
        echoes.append(Echo(text, [0, *ends[:-1]]))
    return echoes


def _top(lp: TokenLogprobs, text: Callable[[int], str]) -> dict[str, float]:
    entries: dict[str, float] = {}
    # The token itself is always included, as in OpenAI's. Among ids with the same text, the likeliest counts.
    for token_id, value in (*lp.top, (lp.token_id, lp.logprob)):
        entries.setdefault(text(token_id), finite(value))
    return entries


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return one token's text; a part of a character is shown as bytes, as OpenAI does."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
