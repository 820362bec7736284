"""Callboard against transformers' generate: SmolLM2-135M on this machine's CPU, in one process, in alternation.

    python -m benchmarks.engine.vs_transformers [--dtypes float32 bfloat16] [--batches 1 8] [--repeats 3] [--threads N]

Both run the same weights, greedy, over the same random prompts, with EOS off. Prefill is the time to every row's first
token; decode counts the tokens after it. A line is the median of the repeats; ratios compare the medians of one run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import DEFAULT_MODEL, EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.loading.checkpoint import Checkpoint, open_checkpoint
from runtime.loading.resolve import resolve
from runtime.worker.sources import CheckpointSource

PROMPT_LEN, OUTPUT_LEN = 128, 64


class Timing(NamedTuple):
    """One batch's seconds."""

    prefill: float
    decode: float

    def rates(self, batch: int) -> tuple[float, float]:
        """Tokens a second: decode, end to end."""
        return batch * (OUTPUT_LEN - 1) / self.decode, batch * OUTPUT_LEN / (self.prefill + self.decode)


def callboard(config: EngineConfig) -> Callable[[np.ndarray], Timing]:
    """A function that runs one batch of prompts through a fresh engine core around one runner."""
    runner = build_runner(config, CheckpointSource(resolve(config.model)))

    def run(prompts: np.ndarray) -> Timing:
        runner.reset()
        engine = build_engine(config, runner.info, InProcess(runner))
        params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        for i, prompt in enumerate(prompts.tolist()):
            engine.add(Request(str(i), prompt, len(prompt), params))
        waiting = len(prompts)
        first = start
        while engine.has_work:
            output = engine.step()
            if output and waiting and (new := sum(len(s.tokens) == PROMPT_LEN + 1 for s in output.states)):
                waiting -= new
                first = time.perf_counter()
        return Timing(first - start, time.perf_counter() - first)

    return run


def transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> Callable[[np.ndarray], Timing]:
    """The same with transformers' generate with SDPA attention; prefill is a generate of one token."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config, attn_implementation="sdpa"))
    model.to_empty(device="cpu")
    model.load_state_dict({n: checkpoint.tensor(n, dtype) for n in checkpoint.names()}, strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its table is not in checkpoints
    model.tie_weights()
    model.eval()

    def generate(prompts: np.ndarray, count: int) -> float:
        ids = torch.from_numpy(prompts)
        start = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            min_new_tokens=count, max_new_tokens=count,
        )  # fmt: skip
        assert out.shape[1] == PROMPT_LEN + count
        return time.perf_counter() - start

    def run(prompts: np.ndarray) -> Timing:
        prefill = generate(prompts, 1)
        return Timing(prefill, generate(prompts, OUTPUT_LEN) - prefill)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()

    checkpoint = open_checkpoint(resolve(args.model))
    torch.set_num_threads(args.threads)
    print(f"{args.model}, {PROMPT_LEN} in / {OUTPUT_LEN} out, {args.threads} threads, torch {torch.__version__}")
    print(f"{'':14}{'decode tok/s':^32}{'end-to-end tok/s':^32}")
    print(f"{'dtype  batch':14}" + f"{'transformers':>13}{'callboard':>11}{'ratio':>8}" * 2)
    for dtype in args.dtypes:
        config = EngineConfig(
            model=args.model, dtype=dtype, device="cpu", num_threads=args.threads, prefix_cache=False,
            max_num_seqs=max(args.batches), max_model_len=PROMPT_LEN + OUTPUT_LEN + 1,
        )  # fmt: skip
        engines = (transformers(checkpoint, getattr(torch, dtype)), callboard(config))
        for batch in args.batches:
            prompts = np.random.default_rng(0).integers(20, checkpoint.config["vocab_size"], (batch, PROMPT_LEN))
            for run in engines:
                run(prompts)
            rounds = [[run(prompts).rates(batch) for run in engines] for _ in range(args.repeats)]
            theirs, ours = (tuple(median(rates) for rates in zip(*r, strict=True)) for r in zip(*rounds, strict=True))
            cells = [f"{t:13.1f}{o:11.1f}{o / t:7.2f}x" for t, o in zip(theirs, ours, strict=True)]
            print(f"{dtype:9}{batch:>3}  {''.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
