"""From the pooled vectors of engines to embeddings, and to scores between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.base.model.pooling import Pooling
from runtime.output.fields import invalid


def embedding(pooled: bytes, pooling: Pooling, dimensions: int | None = None) -> NDArray[np.float32]:
    """Return the vector or its first `dimensions` numbers, with length 1 if the model's vectors have it.

    Raises FieldError if it has fewer numbers, or may not be cut."""
    vector = np.frombuffer(pooled, np.float32)
    size = len(vector)
    if dimensions is not None and (dimensions > size or (dimensions < size and not pooling.cuts_dimensions)):
        only = "" if pooling.cuts_dimensions else ", which is their only size"
        raise invalid("dimensions", f"is {dimensions}; this model's vectors have {size}{only}")
    vector = vector[:dimensions]
    if not pooling.normalized:
        return vector
    return vector / max(math.sqrt(float(vector @ vector)), 1e-12)


def score(pooled: bytes) -> float:
    """Return the probability from a classifier with one label."""
    (logit,) = np.frombuffer(pooled, np.float32).tolist()
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else 1.0 - 1.0 / (1.0 + math.exp(logit))


def texts_of(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the texts to embed for the scores of pairs, each once."""
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def scores(pairs: Sequence[tuple[str, str]], pooled: Sequence[bytes], pooling: Pooling) -> list[float]:
    """Return each pair's score: a classifier's probability, or the embeddings' cosine.

    `pooled` are vectors for the pairs with a classifier, else for `texts_of(pairs)`."""
    if pooling.num_labels:
        return [score(p) for p in pooled]
    unit = Pooling(pooling.kind, normalized=True)
    vectors = {text: embedding(p, unit) for text, p in zip(texts_of(pairs), pooled, strict=True)}
    return [float(vectors[a] @ vectors[b]) for a, b in pairs]
