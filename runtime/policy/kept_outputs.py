"""Output of requests that lost their front or client, for a stream that continues one (C8).

`Request.keeps_output` requests this, and `Request.resumes` takes the tokens up under the same id. The new stream
continues after them as a stream that moves. Without kept tokens they are computed again, with equal bits."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from runtime.base.sampling_fields import Effect, table_of
from runtime.base.types import Request, SamplingParams
from runtime.core.request_state import RequestState

MAX_TOKENS = 1 << 20  # tokens in all kept requests, with their prompts
LIFE_S = 600.0


@dataclass(frozen=True, slots=True)
class Output:
    """The tokens from a request that ended early."""

    request: Request
    fingerprint: str  # fingerprint of the model that sampled them
    token_ids: array[int]
    num_cached: int  # prompt tokens that were cached
    ended_at: float

    @property
    def num_tokens(self) -> int:
        return self.request.prompt_len + len(self.token_ids)


class KeptOutputs:
    """The latest outputs within the limits, by choice id, which contains the owner."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._outputs: dict[str, Output] = {}  # oldest first
        self._num_tokens = 0

    def keep(self, request_id: str, state: RequestState, fingerprint: str) -> None:
        """Keep the output when a request ends early, unless more than tokens must be repeated."""
        has_more = table_of(SamplingParams).has_effect(state.params, {Effect.REPORT})
        if not state.request.keeps_output or has_more or len(state.tokens) == state.prompt_len:
            return
        self._drop(request_id)
        token_ids = state.tokens[state.prompt_len :]
        output = Output(_bare(state.request), fingerprint, token_ids, state.num_cached or 0, self._clock())
        self._outputs[request_id] = output
        self._num_tokens += output.num_tokens
        self._forget_old()

    def take(self, request: Request, fingerprint: str) -> Output | None:
        """Return the kept output of the same request by the same model, and forget it; None without one."""
        self._forget_old()
        output = self._outputs.get(request.request_id)
        if output is None or (output.request, output.fingerprint) != (_bare(request), fingerprint):
            return None
        self._drop(request.request_id)
        return output

    def _forget_old(self) -> None:
        oldest_time = self._clock() - LIFE_S
        while (oldest := next(iter(self._outputs), None)) is not None:
            if self._num_tokens <= MAX_TOKENS and self._outputs[oldest].ended_at >= oldest_time:
                return
            self._drop(oldest)

    def _drop(self, request_id: str) -> None:
        if (output := self._outputs.pop(request_id, None)) is not None:
            self._num_tokens -= output.num_tokens


def _bare(request: Request) -> Request:
    """Return a request without its id and its output, with its seed in one place, and its images by their keys."""
    named = request.named
    params = replace(named.params, seed=None)
    return replace(named, request_id="", token_ids=named.token_ids[: named.prompt_len], params=params)
