"""The encoder and the decoder of a connection that carries plans. Frames name grammars by keys (grammar_store.py)."""

from __future__ import annotations

import msgspec

from runtime.core.plan import StepPlan, decode_plan, encode_plan
from runtime.features.grammar_store import GrammarSender, GrammarStore, by_key


class PlanWriter:
    """Encodes the plans of one connection. Its receivers must get all frames, in order."""

    def __init__(self) -> None:
        self._grammars = GrammarSender()

    def encode(self, plan: StepPlan) -> bytes:
        """Return the frame of a plan. The first frame that names a grammar holds its text."""
        grammars = [new.params.grammar for new in plan.new if new.params.grammar is not None]
        if grammars:
            new = [msgspec.structs.replace(new, params=by_key(new.params)) for new in plan.new]
            plan = msgspec.structs.replace(plan, new=new, grammars=self._grammars.update(grammars))
        return encode_plan(plan)


class PlanReader:
    """Decodes the frames of one connection. It must get all frames, in order."""

    def __init__(self) -> None:
        self._grammars = GrammarStore()

    def decode(self, frame: bytes | bytearray) -> StepPlan:
        """Return the plan of a frame, with whole grammars. Raises CallboardError if the frame is malformed."""
        plan = decode_plan(frame)
        if plan.grammars is not None:
            self._grammars.apply(plan.grammars)
            plan.grammars = None
        for new in plan.new:
            new.params = self._grammars.whole(new.params)
        return plan
