"""Requests at their birth: the choices of a prompt, each with its seed (C4)."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import replace

from runtime.base.types import CallboardError, Request, SamplingParams

SEED_MASK = (1 << 63) - 1
_DRAWN_BITS = 53  # bits in random seeds: every client reads such a number exactly, also JavaScript


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
    prompt_len: int | None = None,
) -> list[Request]:
    """Return a request for each choice of one prompt. Without a seed in `params` the seed is random.

    `prompt_len` marks where an output in `token_ids` begins, which `prompt_logprobs` scores. `max_tokens` are new
    tokens here."""
    if prompt_len is None:
        prompt_len = len(token_ids)
    elif not 1 <= prompt_len <= len(token_ids):
        raise CallboardError(f"prompt_len is {prompt_len}; it must be between 1 and the {len(token_ids)} given tokens.")
    elif params.max_tokens:
        params = replace(params, max_tokens=params.max_tokens + len(token_ids) - prompt_len)
    seed = secrets.randbits(_DRAWN_BITS) if params.seed is None else params.seed
    shared = priority, cache_salt, adapter, prediction
    return [
        Request(next(names), token_ids, prompt_len, params, choice_seed(seed, i), *shared) for i in range(num_choices)
    ]


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of a choice: the request's own for the first one, a derived one for others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _DRAWN_BITS)
