"""Requests at their birth: the choices of a prompt, each with its seed (C4)."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import replace

from runtime.base.types import Request

SEED_MASK = (1 << 63) - 1
_DRAWN_BITS = 53  # bits in random seeds: every client reads such a number exactly, also JavaScript


def requests_of(request: Request, names: Iterator[str], num_choices: int = 1) -> list[Request]:
    """Return a request for each choice of a prompt, like `request` but with its own name and seed.

    Without a seed in its parameters the seed is random. Tokens after its prompt are an output, which `prompt_logprobs`
    scores; `max_tokens` are new tokens here."""
    params, num_output = request.params, len(request.token_ids) - request.prompt_len
    if num_output and params.max_tokens:
        params = replace(params, max_tokens=params.max_tokens + num_output)
    seed = secrets.randbits(_DRAWN_BITS) if params.seed is None else params.seed
    return [
        replace(request, request_id=next(names), params=params, seed=choice_seed(seed, i)) for i in range(num_choices)
    ]


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of a choice: the request's own for the first one, a derived one for others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _DRAWN_BITS)
