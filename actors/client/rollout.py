"""Rollout: one finished output, with what a trainer needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.base.types import FinishReason, TokenLogprobs


@dataclass(slots=True)
class Rollout:
    """One choice of one prompt, after its end."""

    index: int  # the prompt's index, in the call's order
    choice: int  # 0 to n - 1
    prompt_token_ids: list[int]  # shared by all choices of the prompt
    seed: int  # repeats this choice, as the seed of a request with one choice
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    stop_token_id: int | None = None  # the stop id that ended it; None otherwise
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the raw distribution; one a token, if requested
    # (token index, weight version from there on), rising; empty without weight_updates
    weight_versions: Sequence[tuple[int, str]] = ()
    routed_experts: bytes | None = None  # int16 [tokens, layers, top_k]; None if not requested
    num_cached: int = 0  # prompt tokens from the prefix cache
    error: str = ""  # one sentence if it failed; empty otherwise

    @property
    def sampling_logprobs(self) -> list[float]:
        """Each token's log-probability under the distribution that it was drawn from.

        The request must have `sampling_logprobs`. This is the denominator of importance ratios."""
        return [entry.sampling_logprob for entry in self.logprobs if entry.sampling_logprob is not None]
