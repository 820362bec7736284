"""The measuring side of the benchmark: a process that does jobs from its input and writes the results to its output.

This module imports the standard library alone, so that a peer may run in an environment without Callboard."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PROMPT_TOKENS, LONG_PROMPT_TOKENS, BATCH = 16, 480, 8
_DEATH_SIGNAL = 1  # Linux's PR_SET_PDEATHSIG
_IDS = 1000, 30000  # every measured model's vocabulary has them


class Job(NamedTuple):
    """One timed run. Equal numbers give equal prompts, and no two numbers give a common prefix."""

    cell: str
    number: int
    new_tokens: int

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """`count` random prompts of `length` token ids."""
        draw = random.Random(f"{self.cell} {self.number}")
        return [[draw.randrange(*_IDS) for _ in range(length)] for _ in range(count)]


Measure = Callable[[Job], dict[str, float]]


def arguments() -> dict[str, Any]:
    """The settings of this process, which are its one argument."""
    return json.loads(sys.argv[1])


def do_jobs(load: Callable[[dict[str, Any]], tuple[Mapping[str, Measure], dict[str, str]]]) -> None:
    """Call `load` with the settings of this process, and write the facts that it returns. Then do each job.

    Libraries print to standard output too. Their lines go to standard error. This process ends with its parent, even
    while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)

        def reply(value: object) -> None:
            replies.write(json.dumps(value) + "\n")
            replies.flush()

        measures, facts = load(arguments())
        reply(facts)
        for line in sys.stdin:
            job = Job(*json.loads(line))
            reply(measures[job.cell](job))
