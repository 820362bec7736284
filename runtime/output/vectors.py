"""From what engines make of pooled prompts to what was asked for: embeddings, and scores between 0 and 1."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from runtime.core.pooling import Pooling


def embedding(pooled: bytes, pooling: Pooling, dimensions: int | None = None) -> NDArray[np.float32]:
    """The vector, or its first `dimensions` numbers, of length 1 if the model's are."""
    vector = np.frombuffer(pooled, np.float32)[:dimensions]
    if not pooling.normalized:
        return vector
    return vector / max(math.sqrt(float(vector @ vector)), 1e-12)


def score(pooled: bytes) -> float:
    """The probability that a classifier of one label gives."""
    (logit,) = np.frombuffer(pooled, np.float32).tolist()
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else 1.0 - 1.0 / (1.0 + math.exp(logit))
