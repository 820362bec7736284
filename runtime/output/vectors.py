"""From what engines make of pooled prompts to what was asked for: embeddings, and scores between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.output.fields import invalid
from runtime.spec.pooling import Pooling


def check_dimensions(dimensions: int | None, pooling: Pooling) -> None:
    """Raises FieldError if a model's vectors may not be cut to so many numbers, whatever their size."""
    if dimensions is not None and not pooling.cuts_dimensions:
        raise invalid("dimensions", "is not supported by this model, whose vectors have one size; leave it out")
    if dimensions is not None and dimensions < 1:
        raise invalid("dimensions", f"is {dimensions}; it must be at least 1")


def embedding(pooled: bytes, pooling: Pooling, dimensions: int | None = None) -> NDArray[np.float32]:
    """The vector, or its first `dimensions` numbers, of length 1 if the model's are; raises FieldError if it has
    fewer."""
    vector = np.frombuffer(pooled, np.float32)
    if dimensions is not None and dimensions > len(vector):
        raise invalid("dimensions", f"is {dimensions}; this model's vectors have {len(vector)}")
    vector = vector[:dimensions]
    if not pooling.normalized:
        return vector
    return vector / max(math.sqrt(float(vector @ vector)), 1e-12)


def score(pooled: bytes) -> float:
    """The probability that a classifier of one label gives."""
    (logit,) = np.frombuffer(pooled, np.float32).tolist()
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else 1.0 - 1.0 / (1.0 + math.exp(logit))


def texts_of(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """The texts whose embeddings give the scores of pairs, each once."""
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def scores(pairs: Sequence[tuple[str, str]], pooled: Sequence[bytes], pooling: Pooling) -> list[float]:
    """How well the texts of each pair go together: a classifier's probability, which pooled the pairs, or the cosine of
    embeddings; then `texts_of(pairs)` were pooled."""
    if pooling.num_labels:
        return [score(p) for p in pooled]
    unit = Pooling(pooling.kind, normalized=True)
    vectors = {text: embedding(p, unit) for text, p in zip(texts_of(pairs), pooled, strict=True)}
    return [float(vectors[a] @ vectors[b]) for a, b in pairs]
