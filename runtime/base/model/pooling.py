"""Pooling: how a model makes one vector of a prompt, as plain data that engine, runners and fronts share.

A pooled request (`SamplingParams.pooled`) is computed like any other prompt. It ends with its last token: the output is
a vector, and the sampled token is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.base.types import CallboardError, SamplingParams

POOLED = SamplingParams(max_tokens=1, temperature=0.0, pooled=True)  # each vector request's parameters


@dataclass(frozen=True, slots=True)
class Pooling:
    """The source of a model's vectors: the last token's hidden state after the final norm, or the mean."""

    kind: Literal["last", "mean"]
    normalized: bool = False  # fronts divide a vector by its length
    cuts_dimensions: bool = False  # the model is trained so that a vector's first n elements are a vector, too
    num_labels: int = 0  # a classifier's scores; 0 if the vector is the hidden state
    pairs: Literal["plain", "qwen3"] = "plain"  # how a classifier reads a query and a document (output/score_prompt.py)

    @property
    def shares_prefixes(self) -> bool:
        """True if pooled requests use the prefix cache.

        A ranker's prompts begin with one query. Texts to embed have little in common, and a mean needs all tokens'
        states."""
        return self.num_labels > 0 and self.kind == "last"


def required_pooling(pooling: Pooling | None) -> Pooling:
    """Return a model's pooling. Raises CallboardError if the model makes no vectors."""
    if pooling is None:
        raise CallboardError("This model makes no vectors; start it with pooling=last or pooling=mean.")
    return pooling
