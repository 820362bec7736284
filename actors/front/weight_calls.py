"""Calls about weights to all engines of an application at once: on all of them an update ends alike.

Engines change their weights one by one, so replicas may differ for a moment. A request that must not see older weights
names its `min_weight_version`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.front.link import EngineLink
from actors.ray.names import engine_id
from actors.wire.engine_client import WeightsRefused
from actors.wire.link_messages import pause_of

Body = dict[str, Any]
CallEngine = Callable[[str, str, Body], Awaitable[Body]]  # engine's name, call, body -> answer
_NO_ENGINE = "No engine is ready; try again later."
_OF_UPDATES = ("start", "update", "check", "finish")  # calls that end the update of all engines if one engine fails


async def pause_engines(links: Sequence[EngineLink], body: Body) -> dict[str, Body]:
    """Pause all engines, or none. Raises WeightsRefused.

    The links carry this call, so that an engine notices when its caller is gone."""
    if not links:
        raise WeightsRefused(_NO_ENGINE, "unavailable")
    pause = pause_of(body)
    try:
        await asyncio.gather(*(link.pause_for(pause) for link in links))
    except BaseException:  # also if the caller is gone
        for link in links:
            link.cancel_pause(pause.pause_id)
        raise
    return {link.engine: {} for link in links}


async def call_engines(ask: CallEngine, names: Sequence[str], call: str, body: Body) -> dict[str, Body]:
    """Return the answers of these engines by their ids.

    Raises WeightsRefused if an engine refuses the call, and CallboardError if one fails. A failed call of an update
    drops the update on all engines."""
    if not names:
        raise WeightsRefused(_NO_ENGINE, "unavailable")
    if call == "start" and "update_id" not in body:
        body = {**body, "update_id": secrets.token_hex(16)}
    if call == "finish":  # an update that does not fit changes no engine
        body = {**body, **await _agreed(ask, names)}
    bodies = [body] * len(names) if call != "init" else await _with_rank_offsets(ask, names, body)
    found = await asyncio.gather(*map(ask, names, [call] * len(names), bodies), return_exceptions=True)
    errors = [each for each in found if isinstance(each, BaseException)]
    if not errors:
        return {engine_id(name): answer for name, answer in zip(names, found, strict=True)}  # type: ignore[misc]
    grave = [each for each in errors if not (isinstance(each, WeightsRefused) and each.code == "busy")]
    if call == "start":  # only this update: engines that are busy may go on with the one before
        await _discard(ask, names, {"update_id": body["update_id"]})
    elif call in _OF_UPDATES and grave:
        await _discard(ask, names, {})
    raise (grave or errors)[0]


async def _discard(ask: CallEngine, names: Sequence[str], body: Body) -> None:
    await asyncio.gather(*(ask(name, "discard", body) for name in names), return_exceptions=True)


async def _agreed(ask: CallEngine, names: Sequence[str]) -> Body:
    """Check an update on all engines. Returns what `finish` needs for equal versions on all of them.

    An engine may have missed a part, or an older update, while it was lost or had no link to a front."""
    found = list((await call_engines(ask, names, "check", {})).values())
    problem = ""
    if len({(each["update_id"], each["num_parts"]) for each in found}) > 1:
        problem = "The engines have received other parts of the update; begin another."
    elif len({each["identity"] for each in found}) > 1 and not all(each["is_complete"] for each in found):
        problem = "The engines serve different weights, so the next update must have all tensors; send all of them."
    if problem:
        await _discard(ask, names, {})
        raise WeightsRefused(problem, "not_open")
    newest = max(found, key=lambda each: int(each["serial"]))
    return {"update_id": newest["update_id"], "newest": {name: newest[name] for name in ("serial", "name")}}


async def _with_rank_offsets(ask: CallEngine, names: Sequence[str], body: Body) -> list[Body]:
    """Give the ranks of all engines consecutive places in the trainer's group."""
    found = await call_engines(ask, names, "info", {})
    bodies, offset = list[Body](), 0
    for answer in found.values():
        bodies.append({**body, "rank_offset": offset})
        offset += answer["world_size"]
    return bodies
