"""Calls about weights to all engines of an application at once: an update ends alike on all.

Engines change their weights one by one, so replicas may differ for a moment. A request that must not see older weights
names its `min_weight_version`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from actors.front.link import EngineLink
from actors.ray.names import engine_id
from actors.wire.engine_client import WeightsRefused
from actors.wire.link_messages import checked
from actors.wire.weight_calls import A, Check, Connect, Discard, Finish, GetState, Pause, Receive, Start, WeightCall

_NO_ENGINE = "No engine is ready; try again later."


class CallEngine(Protocol):
    """Sends a call to the engine with this name."""

    async def __call__(self, name: str, call: WeightCall[A]) -> A: ...


async def pause_engines(links: Sequence[EngineLink], pause: Pause) -> dict[str, Any]:
    """Pause all engines, or none. Raises WeightsRefused.

    The links carry this call, so that an engine notices when its caller is gone."""
    if not links:
        raise WeightsRefused(_NO_ENGINE, "unavailable")
    pause = checked(pause)
    try:
        await asyncio.gather(*(link.pause_for(pause) for link in links))
    except BaseException:  # also if the caller is gone
        for link in links:
            link.cancel_pause(pause.pause_id)
        raise
    return dict.fromkeys(link.engine for link in links)


async def call_engines(ask: CallEngine, names: Sequence[str], call: WeightCall[A]) -> dict[str, A]:
    """Return these engines' answers by id.

    Raises WeightsRefused if an engine refuses the call, and CallboardError if one fails. If a call fails during an
    update, all engines drop the update."""
    if not names:
        raise WeightsRefused(_NO_ENGINE, "unavailable")
    calls: Sequence[WeightCall[Any]] = [call] * len(names)
    if isinstance(call, Finish):  # an update that does not fit changes no engine
        calls = [await _agreed(ask, names, call)] * len(names)
    elif isinstance(call, Connect):
        calls = await _with_rank_offsets(ask, names, call)
    found = await asyncio.gather(*map(ask, names, calls), return_exceptions=True)
    errors = [each for each in found if isinstance(each, BaseException)]
    if not errors:
        return {engine_id(name): answer for name, answer in zip(names, found, strict=True)}  # type: ignore[misc]
    grave = [each for each in errors if not (isinstance(each, WeightsRefused) and each.code == "busy")]
    if isinstance(call, Start):  # only this update: engines that are busy may go on with the one before
        await _discard(ask, names, call.update_id)
    elif isinstance(call, Receive | Check | Finish) and grave:
        await _discard(ask, names)
    raise (grave or errors)[0]


async def _discard(ask: CallEngine, names: Sequence[str], update_id: str | None = None) -> None:
    await asyncio.gather(*(ask(name, Discard(update_id)) for name in names), return_exceptions=True)


async def _agreed(ask: CallEngine, names: Sequence[str], call: Finish) -> Finish:
    """Check an update on all engines. Returns the call that gives all of them equal versions.

    An engine may have missed a part, or an older update, while it was lost or had no link to a front."""
    found = list((await call_engines(ask, names, Check())).values())
    problem = ""
    if len({(each.update_id, each.num_parts) for each in found}) > 1:
        problem = "The engines have received other parts of the update; begin another."
    elif len({each.identity for each in found}) > 1 and not all(each.is_complete for each in found):
        problem = "The engines serve different weights, so the next update must have all tensors; send all of them."
    if problem:
        await _discard(ask, names)
        raise WeightsRefused(problem, "not_open")
    newest = max(found, key=lambda each: each.serial)
    return replace(call, update_id=newest.update_id, newest=(newest.serial, newest.name))


async def _with_rank_offsets(ask: CallEngine, names: Sequence[str], call: Connect) -> list[Connect]:
    """Give the ranks of all engines consecutive places in the trainer's group."""
    calls, offset = list[Connect](), 0
    for state in (await call_engines(ask, names, GetState())).values():
        calls.append(replace(call, rank_offset=offset))
        offset += state.world_size
    return calls
