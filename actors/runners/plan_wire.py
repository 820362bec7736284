"""The encoder and the decoder of a connection that carries plans.

Grammars and images have frames of their own, before the plan that names them (features/keyed_store.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from runtime.base.images import Image
from runtime.base.types import Grammar
from runtime.core.plan import StepPlan, decode_plan, encode_plan
from runtime.features.keyed_store import KeyedSender, KeyedStore


class PlanWriter:
    """Encodes the plans of one connection. Its receivers must get all frames, in order."""

    def __init__(self) -> None:
        self._sender = KeyedSender()

    def frames(self, plan: StepPlan) -> list[bytes]:
        """Return the frames of a plan, which is the last one."""
        values: list[Grammar | Image] = [new.params.grammar for new in plan.new if new.params.grammar is not None]
        values += [each.image for each in plan.encodings]
        updates = self._sender.frames(values) if values else []
        return [*updates, encode_plan(_with_keyed(plan, lambda value: value.named))]


class PlanReader:
    """Decodes the frames of one connection. It must get all frames, in order."""

    def __init__(self) -> None:
        self.store = KeyedStore()

    def decode(self, frame: bytes | bytearray) -> StepPlan | None:
        """Return the plan of a frame, with whole grammars and images; None if it brings these for a later plan.

        Raises CallboardError or msgspec.DecodeError if the frame is malformed."""
        return None if self.store.take(frame) else _with_keyed(decode_plan(frame), self.store.whole)


def _with_keyed(plan: StepPlan, change: Callable[[Any], Any]) -> StepPlan:
    """Return a copy in which `change` replaces each grammar and image."""
    if not plan.new and not plan.encodings:
        return plan
    new = [replace(each, params=each.params.with_keyed(change)) for each in plan.new]
    encodings = [replace(each, image=change(each.image)) for each in plan.encodings]
    return replace(plan, new=new, encodings=encodings)
