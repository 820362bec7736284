"""The gaps of a stream while prompts are computed beside it, and the prompts' times.

    python -m benchmarks.beside_prompts --model FILE.gguf --prompts 2000 7200 --against REVISION

A round is a chat that streams and a prompt of `--prompts` tokens. With `--title` a short prompt arrives behind it, like
an agent's request for a title. `--against` names a git revision: each round also runs with the pacing of
this revision, in turn, for machines with unsteady speed. The first round begins without estimates. With `--cpu-time`
all clocks show this process's CPU time divided by its threads, so that other processes matter less.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.library.measure import Results, engine_config, new_parser
from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.loading.resolve import resolve
from runtime.policy import step_pacing
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource


def pacing_of(revision: str) -> ModuleType:
    """Return `runtime.policy.step_pacing` of a git revision."""
    path = "runtime/policy/step_pacing.py"
    text = subprocess.run(["git", "show", f"{revision}:{path}"], check=True, capture_output=True, text=True).stdout
    sys.modules[revision] = module = ModuleType(revision)
    exec(compile(text, f"{revision}:{path}", "exec"), module.__dict__)
    return module


def cpu_time() -> float:
    """Return the seconds that the process would have taken without other processes."""
    return time.process_time() / torch.get_num_threads()


class Served:
    """One engine over the runner, and the times of its requests' tokens."""

    def __init__(self, runner: ModelRunner, config: Any, pacing: Any, seed: int, clock: Callable[[], float]) -> None:
        runner.reset()
        self.core = build_engine(config, runner.info, InProcess(runner), None, pacing)
        self.rng, self.vocab_size = np.random.default_rng(seed), runner.info.vocab_size
        self.clock, self.times = clock, dict[str, list[float]]()  # times of each request's tokens

    def add(self, name: str, prompt_len: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        tokens = self.rng.integers(0, self.vocab_size, prompt_len).tolist()
        self.core.add(Request(name, tokens, prompt_len, params))
        self.times[name] = []

    def run_until(self, name: str, count: int) -> None:
        """Run steps until this request has `count` tokens."""
        while len(self.times[name]) < count:
            output = self.core.step()
            for state in output.states if output is not None else ():
                self.times[state.request.request_id].append(self.clock())

    def measure(self, prompt_len: int, title_len: int) -> dict[str, Any]:
        """One round: gaps of the chat in ms, times from arrival to the first token in seconds."""
        self.add("chat", 40, 1 << 20)
        self.run_until("chat", 20)
        start = self.clock()
        self.add("prompt", prompt_len, 2)
        if title_len:
            self.add("title", title_len, 2)
        self.run_until("prompt", 1)
        if title_len:
            self.run_until("title", 1)
        self.run_until("chat", len(self.times["chat"]) + 2)
        gaps = np.diff([at for at in self.times["chat"] if at > start - 0.2]) * 1e3
        first = {f"{name}_s": self.times[name][0] - start for name in ("prompt", "title") if name in self.times}
        return {"gap_ms": median(gaps), "longest_gap_ms": max(gaps), "num_steps": len(gaps)} | first


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--model", required=True, help="a stored model, a folder or a file")
    parser.add_argument("--prompts", nargs="+", type=int, default=[2000, 7200], metavar="TOKENS")
    parser.add_argument("--title", type=int, default=0, metavar="TOKENS", help="0 for no such prompt")
    parser.add_argument("--against", metavar="REVISION")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    config = engine_config(args.set, model=args.model, max_model_len=max(args.prompts) + 512)
    results = Results("beside_prompts", args.out)
    runner = build_runner(config, CheckpointSource(resolve(args.model)))
    clock = cpu_time if args.cpu_time else time.perf_counter
    modules = {"now": step_pacing} | ({args.against: pacing_of(args.against)} if args.against else {})
    pacings = {name: module.StepPacing(config.max_itl_ms, clock) for name, module in modules.items()}
    for number in range(args.rounds):
        for prompt_len in args.prompts:
            for name, pacing in pacings.items():
                found = Served(runner, config, pacing, number, clock).measure(prompt_len, args.title)
                load = os.getloadavg()[0]
                results.add(config, pacing=name, round=number, prompt_len=prompt_len, title=args.title, load=load,
                            **found)  # fmt: skip


if __name__ == "__main__":
    main()
