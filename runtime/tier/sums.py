"""The checksum of a slot's payload, which shows a damaged or foreign block.

Words x_i have odd weights w_i, and the sum is that of w_i * x_i modulo 2^64, in any order. The key's words are added
by xor, so another key's payload does not fit. `runtime/kernels/tier` has the same sum for tensors."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WEIGHT_STEP, WEIGHT_START = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


@lru_cache(4)
def weights(num_words: int) -> NDArray[np.uint64]:
    """Return the odd weight of each word."""
    return (np.arange(num_words, dtype=np.uint64) * np.uint64(WEIGHT_STEP) + np.uint64(WEIGHT_START)) | np.uint64(1)


def key_words(keys: bytes) -> NDArray[np.uint64]:
    """Return keys of 16 bytes as words [n, 2]: low, high."""
    return np.frombuffer(keys, "<u8").reshape(-1, 2)


def key_sums(keys: bytes) -> NDArray[np.uint64]:
    """Return what a key adds to its payload's sum by xor [n]."""
    low, high = key_words(keys).T
    words: NDArray[np.uint64] = low ^ (high << np.uint64(32) | high >> np.uint64(32))
    return words


def payload_sums(payload: NDArray[np.uint8], keys: bytes) -> NDArray[np.uint64]:
    """Return the rows' checksums [n] for a payload [n, slot_bytes]. `slot_bytes` is a multiple of 8."""
    words = payload.view("<u8")
    # `@` would hold Python's lock, so threads would take turns.
    sums: NDArray[np.uint64] = np.einsum("ij,j->i", words, weights(words.shape[1]))
    return sums ^ key_sums(keys)
