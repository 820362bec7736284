"""Requests at their birth: the choices of a prompt, each with its seed (C4)."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator

from runtime.spec.types import Request, SamplingParams

SEED_MASK = (1 << 63) - 1
_DRAWN_BITS = 53  # of random seeds: every client reads such a number exactly, also JavaScript


def requests_of(
    names: Iterator[str],
    token_ids: list[int],
    params: SamplingParams,
    num_choices: int = 1,
    *,
    priority: int = 0,
    cache_salt: str = "",
    adapter: str = "",
    prediction: tuple[int, ...] = (),
) -> list[Request]:
    """Return a request for each choice of one prompt. Without a seed in `params` the seed is random."""
    seed = secrets.randbits(_DRAWN_BITS) if params.seed is None else params.seed
    of_all = priority, cache_salt, adapter, prediction
    return [
        Request(next(names), token_ids, len(token_ids), params, choice_seed(seed, i), *of_all)
        for i in range(num_choices)
    ]


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of a choice: the request's own for the first one, a derived one for others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _DRAWN_BITS)
