"""transformers as a side: one model in this process, and greedy steps with its cache.

A step is a call of the model itself: `generate` would add its own time to each token."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.cpu_peers.jobs import BATCH, LONG_PROMPT_TOKENS, PROMPT_TOKENS, Job, Measure, do_jobs


class Transformers:
    """The cells that run in this process."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def decode(self, job: Job) -> dict[str, float]:
        (prompt,) = job.prompts(1, PROMPT_TOKENS)
        token, cache = self._step(torch.tensor([prompt]), None)
        start, cpu = time.perf_counter(), time.process_time()
        num_after = job.new_tokens - 1
        for _ in range(num_after):
            token, cache = self._step(token, cache)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return {"tok_s": num_after / seconds, "cpu_ms": 1e3 * cpu / num_after}

    @torch.inference_mode()
    def prompt(self, job: Job) -> dict[str, float]:
        (prompt,) = job.prompts(1, LONG_PROMPT_TOKENS)
        start = time.perf_counter()
        self._step(torch.tensor([prompt]), None)
        return {"tok_s": LONG_PROMPT_TOKENS / (time.perf_counter() - start)}

    @torch.inference_mode()
    def batch8(self, job: Job) -> dict[str, float]:
        start = time.perf_counter()
        token, cache = self._step(torch.tensor(job.prompts(BATCH, PROMPT_TOKENS)), None)
        for _ in range(job.new_tokens - 1):
            token, cache = self._step(token, cache)
        return {"tok_s": BATCH * job.new_tokens / (time.perf_counter() - start)}

    def _step(self, token_ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """The next token of each row, and the cache."""
        done = self._model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return done.logits[:, -1:].argmax(-1), done.past_key_values


def load(settings: dict[str, Any]) -> tuple[Mapping[str, Measure], dict[str, str]]:
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    cells = Transformers(model)
    facts = {"transformers": transformers.__version__, "dtype": settings["dtype"]}
    return {"decode": cells.decode, "prompt": cells.prompt, "batch8": cells.batch8}, facts


if __name__ == "__main__":
    do_jobs(load)
