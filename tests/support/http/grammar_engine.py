"""A scripted engine that writes random text within a request's grammar."""

import random

import numpy as np

from runtime.base.types import Request
from runtime.structured.matching.lazy import LazyEngine
from runtime.text.vocabulary import SPECIAL_BYTES
from tests.support.http.fake_engine import EOS, FakeEngine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"enum": [1, "}"]}}, "required": ["a"]},
        },
    }
    for name in ("add", "add_all", "sub")
]
_ENGINE = LazyEngine(SPECIAL_BYTES)
NAMED = {"type": "function", "function": {"name": "add"}}


class GrammarEngine(FakeEngine):
    """Answers with random bytes that the request's grammar allows. Where the answer may end, it ends in a quarter of
    all cases, and always beyond `most` bytes. It writes white space where nothing else may follow, or rarely."""

    def __init__(self, seed: int, most: int = 400) -> None:
        super().__init__(max_model_len=4096)
        self._random, self._most, self.text = random.Random(seed), most, ""

    def _outputs(self, request: Request):
        assert request.params.grammar is not None
        matcher, script = _ENGINE.matcher(request.params.grammar.lark), []
        while EOS not in script:
            mask = np.zeros(SPECIAL_BYTES.num_words, np.int32)
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            may_end = EOS in allowed and (len(script) > self._most or self._random.random() < 0.25)
            others = [i for i in allowed if i != EOS]
            if self._random.random() < 0.8:
                others = [i for i in others if chr(i) not in "\t\n\r "] or others
            script.append(EOS if may_end or not others else self._random.choice(others))
            matcher.advance(script[-1:])
        self.script, self.text = script, bytes(i for i in script if i < EOS).decode()
        return super()._outputs(request)
