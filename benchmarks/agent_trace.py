"""Agent conversations with long prompts: the tokens that turns compute again, and the time to the first token.

    python -m benchmarks.agent_trace --model qwen3.5-9b                               # on a GPU
    python -m benchmarks.agent_trace --model tiny-hybrid --agents 3                   # on a CPU, smaller

Each turn's prompt is the last one, its output and `--new` other tokens. The agents' turns alternate, so their states
compete for snapshots. A token is computed again if an earlier prompt or output of its agent had it. With a
model without recurrent states, the last block is computed again; with states, also the outputs.
"""

from __future__ import annotations

import time
from statistics import median

from benchmarks.library.measure import Engine, Results, engine_config, new_parser
from runtime.base.types import Request, SamplingParams


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--first", type=int, default=80_000, help="tokens of the first prompt")
    parser.add_argument("--new", type=int, default=800, help="tokens that a turn adds beside the last output")
    parser.add_argument("--answer", type=int, default=200, help="tokens of an output")
    args = parser.parse_args()
    longest = args.first + args.turns * (args.new + args.answer)
    config = engine_config(args.set, max_model_len=longest, max_num_seqs=8)
    engine, results = Engine(args.model, config), Results("agent_trace", args.out)
    core, rng = engine.core, engine.rng
    params = SamplingParams(max_tokens=args.answer, ignore_eos=True, temperature=0.0)
    prompts = [rng.integers(0, engine.info.vocab_size, args.first).tolist() for _ in range(args.agents)]
    known, again, prompt_tokens, firsts = [0] * args.agents, 0, 0, list[float]()
    for turn in range(args.turns):
        for agent, prompt in enumerate(prompts):
            before, start, first, output = (
                core.scheduler.stats.prompt_tokens_cached,
                time.perf_counter(),
                0.0,
                list[int](),
            )
            core.add(Request(f"{turn}-{agent}", prompt, len(prompt), params))
            while core.has_work:
                if (step := core.step()) is not None and step.token_ids:
                    first = first or time.perf_counter() - start
                    output += step.token_ids
            cached = core.scheduler.stats.prompt_tokens_cached - before
            if turn:
                again += known[agent] - min(cached, known[agent])
                prompt_tokens += len(prompt)
                firsts.append(first)
            known[agent] = len(prompt) + len(output)
            prompts[agent] = [*prompt, *output, *rng.integers(0, engine.info.vocab_size, args.new).tolist()]
    stats = core.current_stats()
    results.add(
        config, model=args.model, agents=args.agents, turns=args.turns, first=args.first, new=args.new,
        answer=args.answer, computed_again=again, of_prompt_tokens=prompt_tokens, share=again / prompt_tokens,
        first_token_ms=median(firsts) * 1e3, snapshots=stats.snapshots, snapshots_evicted=stats.snapshots_evicted,
    )  # fmt: skip


if __name__ == "__main__":
    main()
