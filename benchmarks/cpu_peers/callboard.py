"""Callboard as a side: one LLM in this process.

`decode` and `prompt` drive its engine, without text. `batch8` is a call of LLM.generate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from benchmarks.cpu_peers.jobs import BATCH, LONG_PROMPT_TOKENS, PROMPT_TOKENS, Job, Measure, do_jobs
from benchmarks.library.measure import engine_config
from runtime.base.types import Request, SamplingParams
from runtime.core.engine import EngineCore
from runtime.llm import LLM


class Times(NamedTuple):
    """Seconds of one request."""

    first: float  # until its first token
    rest: float  # from then on
    rest_cpu: float  # of all threads of this process


class Callboard:
    """The cells that run in this process."""

    def __init__(self, engine: EngineCore, llm: LLM) -> None:
        self._engine, self._llm, self._num_requests = engine, llm, 0

    def decode(self, job: Job) -> dict[str, float]:
        (prompt,) = job.prompts(1, PROMPT_TOKENS)
        times, num_after = self._run(prompt, job.new_tokens), job.new_tokens - 1
        return {"tok_s": num_after / times.rest, "cpu_ms": 1e3 * times.rest_cpu / num_after}

    def prompt(self, job: Job) -> dict[str, float]:
        (prompt,) = job.prompts(1, LONG_PROMPT_TOKENS)
        return {"tok_s": LONG_PROMPT_TOKENS / self._run(prompt, 1).first}

    def batch8(self, job: Job) -> dict[str, float]:
        prompts = job.prompts(BATCH, PROMPT_TOKENS)
        start = time.perf_counter()
        done = self._llm.generate(prompts, _greedy(job.new_tokens), progress=False)
        seconds = time.perf_counter() - start
        assert all(len(each.token_ids) == job.new_tokens for each in done)
        return {"tok_s": BATCH * job.new_tokens / seconds}

    def _run(self, prompt: list[int], new_tokens: int) -> Times:
        engine = self._engine
        self._num_requests += 1
        num_tokens, first, cpu = 0, 0.0, 0.0
        start = time.perf_counter()
        engine.add(Request(f"job-{self._num_requests}", prompt, len(prompt), _greedy(new_tokens)))
        while engine.has_work:
            output = engine.step()
            if output is not None and output.token_ids:
                if not num_tokens:
                    first, cpu = time.perf_counter(), time.process_time()
                num_tokens += len(output.token_ids)
        end, end_cpu = time.perf_counter(), time.process_time()
        assert num_tokens == new_tokens
        return Times(first - start, end - first, end_cpu - cpu)


def _greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)


def load(settings: dict[str, Any]) -> tuple[Mapping[str, Measure], dict[str, str]]:
    defaults = {"device": "cpu", "num_threads": settings["threads"], "max_model_len": 1024}
    config = engine_config(settings["set"], **defaults)
    llm = LLM(settings["model"], **{name: value for name, value in asdict(config).items() if name != "model"})
    engine, runner = llm.engine, llm.runner
    cells = Callboard(engine, llm)
    facts = {
        "weights": runner.info.weight_formats,
        "dtype": runner.info.dtype,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
    }
    return {"decode": cells.decode, "prompt": cells.prompt, "batch8": cells.batch8}, facts


if __name__ == "__main__":
    do_jobs(load)
