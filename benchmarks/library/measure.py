"""The shared parts of benchmarks: an engine in this process on random weights, timed batches, and one JSON line a
result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from actors.ray.process import SWITCH_INTERVAL_S
from benchmarks.library.models import CONFIGS, head_of, spec_of, tower_of
from benchmarks.library.ranks import RankGroupProcesses
from runtime.assembly.engine import build_engine, speculation_of
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import Executor, InProcess
from runtime.policy.step_pacing import StepPacing
from runtime.worker.sources import DummySource


def new_parser(doc: str, *, model: bool = True) -> argparse.ArgumentParser:
    """The options of every benchmark that can run an engine in this process."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model:
        parser.add_argument("--model", choices=sorted(CONFIGS), default="llama-3.2-1b", help="its shape")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of EngineConfig")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    return parser


def engine_config(settings: list[str], **defaults: Any) -> EngineConfig:
    """`defaults` and then FIELD=VALUE pairs; a value is JSON, or else a text."""
    known = {f.name for f in fields(EngineConfig)}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known:
            sys.exit(f"EngineConfig has no field {name!r}; it has {', '.join(sorted(known))}.")
        try:
            defaults[name] = json.loads(value)
        except ValueError:
            defaults[name] = value
    return EngineConfig(**defaults)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch's times in seconds, from when its first request was added."""

    first: float  # until every request had its first token
    total: float
    num_tokens: int  # output tokens
    num_decoded: int  # output tokens after `first`
    step_ends: tuple[float, ...]  # ends of the steps after `first`

    @property
    def decode_rate(self) -> float:
        """Output tokens a second after `first`."""
        return self.num_decoded / (self.total - self.first)

    @property
    def output_rate(self) -> float:
        """All output tokens over all of the time."""
        return self.num_tokens / self.total


class Engine:
    """An engine core and a runner with random weights, or ranks in their own processes. Runs batches with fresh random
    prompts, with EOS off, and greedy unless `sampling` is set. A `paced` one bounds prompts as a server does."""

    def __init__(
        self, model: str, config: EngineConfig, sampling: Mapping[str, float] | None = None, paced: bool = False
    ) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # a server's processes do so, too
        self.config = config
        self.sampling = {"temperature": 0.0} | dict(sampling or {})
        executor: Executor
        if config.tensor_parallel_size == 1:
            self.runner = build_runner(
                config, DummySource(spec_of(model), tower=tower_of(model), draft_head=head_of(model))
            )
            self.info, executor = self.runner.info, InProcess(self.runner)
        else:
            self._ranks = RankGroupProcesses(model, config)
            self.info, executor = self._ranks.info, self._ranks.executor
        speculation = speculation_of(config, self.info, time.perf_counter)
        pacing = StepPacing(config.max_itl_ms, time.perf_counter) if paced else None
        self.core = build_engine(config, self.info, executor, speculation, pacing)
        self.rng = np.random.default_rng(0)
        self.adapters = [""]  # that requests have in turn, by their digests
        self._num_requests = 0

    def add(self, batch: int, prompt_len: int, output_len: int) -> None:
        """Queue `batch` requests; no two prompts ever share a block, so that the prefix cache cannot help."""
        params = SamplingParams(max_tokens=output_len, ignore_eos=True, **self.sampling)
        for prompt in self.rng.integers(0, self.info.vocab_size, (batch, prompt_len)).tolist():
            adapter = self.adapters[self._num_requests % len(self.adapters)]
            self._num_requests += 1
            self.core.add(Request(str(self._num_requests), prompt, prompt_len, params, adapter=adapter))

    def run(self, batch: int, prompt_len: int, output_len: int) -> Run:
        """One batch from the first request's add to the last token's commit."""
        core, waiting, num_tokens, num_before, first, total = self.core, batch, 0, 0, 0.0, 0.0
        ends: list[float] = []
        start = time.perf_counter()
        self.add(batch, prompt_len, output_len)
        while core.has_work:
            output = core.step()
            if output is None:
                continue
            now = time.perf_counter() - start
            total = now if len(output.token_ids) else total  # a tier's copies may follow
            num_tokens += len(output.token_ids)
            if waiting:
                waiting -= sum(len(state.tokens) == prompt_len + 1 for state in output.states)
                if not waiting:
                    first, num_before = now, num_tokens
            else:
                ends.append(now)
        if num_tokens != batch * output_len:
            raise RuntimeError(f"{num_tokens} tokens came out where {batch * output_len} were asked for.")
        return Run(first, total, num_tokens, num_tokens - num_before, tuple(ends))


class Results:
    """Prints each measurement as a JSON line unless `show` is False, and appends it to a file if one is named."""

    def __init__(self, benchmark: str, out: Path | None, *, show: bool = True) -> None:
        self._out, self._show = out, show
        self._common = {
            "benchmark": benchmark,
            "machine": _machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "commit": _commit()}
            | ({"triton": sys.modules["triton"].__version__} if "triton" in sys.modules else {}),
            "command": _command(),
            "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }

    def add(self, config: EngineConfig | None = None, **values: Any) -> None:
        """`values` name the measurement and its figures; fields of `config` that differ from the defaults are
        recorded."""
        changed = {} if config is None else _changed(config)
        line = json.dumps(self._common | {"config": changed} | _rounded(values))
        if self._show:
            print(line, flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(line + "\n")


def middle(values: list[float]) -> tuple[float, list[float]]:
    """The median, and the least and the greatest value."""
    return median(values), [min(values), max(values)]


def percentiles(seconds: list[float] | np.ndarray) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {"p50": float(p50), "p99": float(p99)}


def _changed(config: EngineConfig) -> dict[str, Any]:
    default = EngineConfig()
    return {f.name: v for f in fields(config) if (v := getattr(config, f.name)) != getattr(default, f.name)}


def _rounded(value: Any) -> Any:
    """Five significant digits are more than any of these figures has."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case Mapping():
            return {k: _rounded(v) for k, v in value.items()}
        case [*items]:
            return [_rounded(v) for v in items]
    return value


def _command() -> str:
    """The command that runs this process, without the place of the lines."""
    spec = sys.modules["__main__"].__spec__
    module = [] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    given = iter(sys.argv[1:])
    arguments = [arg for arg in given if arg not in ("--out", "--output") or next(given, None) is None]
    return shlex.join(["python", *module, *arguments])


def _machine() -> str:
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    if not torch.cuda.is_available():
        return cores
    return f"{torch.cuda.get_device_name()}, {cores}"


def _commit() -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
