"""Pooling: how a model makes one vector of a prompt, as plain data that engine, runners and fronts share.

A pooled request (`SamplingParams.pooled`) is computed like any other prompt. With its last token it ends: what comes
back is a vector, and the token that is sampled there is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.spec.types import CallboardError, SamplingParams

POOLED = SamplingParams(max_tokens=1, temperature=0.0, pooled=True)  # of each request for a vector


@dataclass(frozen=True, slots=True)
class Pooling:
    """The source of a model's vectors: hidden states after the final norm, of the last token or the mean of all."""

    kind: Literal["last", "mean"]
    normalized: bool = False  # fronts divide a vector by its length
    cuts_dimensions: bool = False  # trained so that the first numbers of a vector, normalised, are one, too
    # The vector is that of a classifier with so many scores, of the hidden state; 0: the hidden state itself.
    num_labels: int = 0
    pairs: Literal["plain", "qwen3"] = "plain"  # how a classifier reads a query and a document (output/score_prompt.py)

    @property
    def shares_prefixes(self) -> bool:
        """True if requests keep what they computed for others: those of a ranker begin with one query, while texts to
        be embedded have little in common, and a mean needs the states of all tokens."""
        return self.num_labels > 0 and self.kind == "last"


def required_pooling(pooling: Pooling | None) -> Pooling:
    """A model's pooling; raises CallboardError for one that makes no vectors."""
    if pooling is None:
        raise CallboardError("This model makes no vectors; start it with pooling=last or pooling=mean.")
    return pooling
