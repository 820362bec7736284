"""Decoding with and without guesses: the engine, its runner and its draft as actors, requests over a link.

For each draft an engine is started, and for each batch size its requests decode together; a batch's first round is
not measured. Tokens a second count from when every request has its first token until the first request ends. The
texts of all drafts are compared.

    python -m benchmarks.drafts.speculation MODEL --drafts none DRAFT ngram --batches 1 8 64
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from dataclasses import replace
from typing import Any

import numpy as np

from actors.ray.environment import SINGLE_MACHINE, ray_token

os.environ.update(SINGLE_MACHINE | ray_token())  # before `import ray`

import ray

from actors.engine.supervisor import Supervisor
from actors.front.engine_group import EngineGroup
from actors.ray.directory import RayDirectory, find_engines
from actors.ray.machines import machines_now
from actors.ray.placement import bundles, device_of
from benchmarks.library.measure import Results, engine_config, middle, new_parser
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams

LEARNED = "acceptance", "verify_overhead_us", "step_overhead_us", "draft_answer_overhead_us", "draft_late_rounds"


async def run_batch(
    link: EngineGroup, prompts: list[list[int]], params: SamplingParams
) -> tuple[float, list[list[int]]]:
    """All requests' tokens a second while all decode; their tokens."""
    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]

    async def one(i: int) -> None:
        request = Request(f"{time.time_ns()}-{i}", prompts[i], len(prompts[i]), params, seed=i)
        async for output in link.generate(request):
            if output.error:
                raise RuntimeError(output.error)
            arrivals[i].append((time.perf_counter(), len(output.token_ids)))
            tokens[i] += output.token_ids

    await asyncio.gather(*(one(i) for i in range(len(prompts))))
    start, end = max(a[0][0] for a in arrivals), min(a[-1][0] for a in arrivals)
    count = sum(n for a in arrivals for at, n in a if start < at <= end)
    return count / (end - start), tokens


async def measure(config: EngineConfig, args: Any, results: Results, texts: dict[Any, str]) -> None:
    gpu = device_of(config, machines_now()).gpu
    group = ray.util.placement_group(bundles(config, gpu), "STRICT_PACK")
    ray.get(group.ready(), timeout=60)
    name = f"speculation-{time.time_ns()}"
    supervisor = Supervisor(config, name, group, gpu)
    began = time.perf_counter()
    await supervisor.start()
    start_s = time.perf_counter() - began
    link = EngineGroup(RayDirectory(f"{name}#"))
    await link.start()
    (engine,) = find_engines(f"{name}#")
    rng = np.random.default_rng(0)
    for batch in args.batches:
        prompts = rng.integers(0, link.info.vocab_size - 300, (batch, args.prompt_len)).tolist()
        for temperature in args.temperatures:
            params = SamplingParams(max_tokens=args.output_len, temperature=temperature, ignore_eos=True)
            await run_batch(link, prompts, replace(params, max_tokens=args.output_len // 2))
            before = await engine.stats.remote()
            rates = []
            for _ in range(args.repeats):
                rate, tokens = await run_batch(link, prompts, params)
                rates.append(rate)
            after = await engine.stats.remote()
            grown = {k: after[k] - before[k] for k in ("steps", "drafts", "draft_tokens", "accepted_draft_tokens")}
            text = hashlib.sha256(repr(tokens).encode()).hexdigest()[:12]
            first = texts.setdefault((batch, temperature), text)
            num_tokens = batch * args.output_len * args.repeats
            median, spread = middle(rates)
            results.add(
                config, batch=batch, temperature=temperature, prompt_len=args.prompt_len, output_len=args.output_len,
                decode_tok_s=median, spread=spread, tokens_a_step=num_tokens / grown["steps"] / batch,
                guesses_a_row=grown["draft_tokens"] / max(1, grown["drafts"]),
                accepted_share=grown["accepted_draft_tokens"] / max(1, grown["draft_tokens"]),
                text=text, same_text=text == first, start_s=start_s,
                **{k: after[k] for k in LEARNED if k in after},
            )  # fmt: skip
    link.close()
    supervisor._watch.cancel()
    ray.kill(engine)
    ray.util.remove_placement_group(group)


async def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("model", help="as EngineConfig.model")
    parser.add_argument("--drafts", nargs="+", default=["none"], help="as EngineConfig.draft, or none")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    results, texts = Results("speculation", args.out), {}
    ray.init(include_dashboard=False, log_to_driver=False)
    for draft in args.drafts:
        settings = [*args.set] if draft == "none" else [*args.set, f"draft={draft}"]
        await measure(engine_config(settings, model=args.model), args, results, texts)
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
