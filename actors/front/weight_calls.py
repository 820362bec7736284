"""Calls about weights to all engines of an application at once: on all of them an update ends alike.

Engines change their weights one by one, so replicas may differ for a moment. A request that must not see older weights
names its `min_weight_version`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from actors.ray.names import engine_id
from actors.wire.engine_client import WeightsRefused
from runtime.spec.types import CallboardError

Body = dict[str, Any]
CallEngine = Callable[[str, str, Body], Awaitable[Body]]  # engine's name, call, body -> answer
_OF_UPDATES = ("start", "update", "check", "finish")  # calls that end the update of all engines if one engine fails


async def call_engines(ask: CallEngine, names: Sequence[str], call: str, body: Body) -> dict[str, Body]:
    """Return the answers of these engines by their ids.

    Raises WeightsRefused if an engine refuses the call, and CallboardError if one fails. A failed call of an update
    drops the update on all engines."""
    if not names:
        raise WeightsRefused("No engine is ready; try again later.", "unavailable")
    if call == "start" and "update_id" not in body:
        body = {**body, "update_id": secrets.token_hex(16)}
    if call == "finish":  # an update that does not fit changes no engine
        await call_engines(ask, names, "check", {})
    bodies = [body] * len(names) if call != "init" else await _with_rank_offsets(ask, names, body)
    found = await asyncio.gather(*map(ask, names, [call] * len(names), bodies), return_exceptions=True)
    errors = [each for each in found if isinstance(each, BaseException)]
    if not errors:
        return {engine_id(name): answer for name, answer in zip(names, found, strict=True)}  # type: ignore[misc]
    is_busy = isinstance(errors[0], WeightsRefused) and errors[0].code == "busy"
    if call in _OF_UPDATES and not is_busy:
        with suppress(CallboardError):
            await asyncio.gather(*(ask(name, "discard", {}) for name in names), return_exceptions=True)
    raise errors[0]


async def _with_rank_offsets(ask: CallEngine, names: Sequence[str], body: Body) -> list[Body]:
    """Give the ranks of all engines consecutive places in the trainer's group."""
    found = await call_engines(ask, names, "info", {})
    bodies, offset = list[Body](), 0
    for answer in found.values():
        bodies.append({**body, "rank_offset": offset})
        offset += answer["world_size"]
    return bodies
