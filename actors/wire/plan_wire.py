"""The two ends of a connection that carries plans: frames name grammars by their keys (grammar_store.py)."""

from __future__ import annotations

import msgspec

from runtime.core.plan import StepPlan, decode_plan, encode_plan
from runtime.features.grammar_store import GrammarSender, GrammarStore, by_key


class PlanWriter:
    """Encodes the plans of one connection. Its receivers get all frames, in order."""

    def __init__(self) -> None:
        self._grammars = GrammarSender()

    def encode(self, plan: StepPlan) -> bytes:
        """The frame of a plan; a grammar's text is in the first frame that names it."""
        grammars = [new.params.grammar for new in plan.new if new.params.grammar is not None]
        if grammars:
            new = [msgspec.structs.replace(new, params=by_key(new.params)) for new in plan.new]
            plan = msgspec.structs.replace(plan, new=new, grammars=self._grammars.update(grammars))
        return encode_plan(plan)


class PlanReader:
    """Decodes the frames of one connection, all of them and in order."""

    def __init__(self) -> None:
        self._grammars = GrammarStore()

    def decode(self, frame: bytes | bytearray) -> StepPlan:
        """The plan of a frame, with whole grammars. Raises CallboardError if it is not a whole plan."""
        plan = decode_plan(frame)
        if plan.grammars is not None:
            self._grammars.apply(plan.grammars)
            plan.grammars = None
        for new in plan.new:
            new.params = self._grammars.whole(new.params)
        return plan
