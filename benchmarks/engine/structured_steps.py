"""The extra time of decode steps and the first token with grammars: random weights, with all rows in a batch bound
or none.

    python -m benchmarks.engine.structured_steps --model llama-3.1-8b --tokenizer FOLDER --batches 64
    python -m benchmarks.engine.structured_steps --model gpt-oss-20b --tokenizer FOLDER --batches 1 64 --channels

All rows follow one schema of open strings, or the grammar for a turn in channels without tools, at temperature 1. They
are served by the lazy engine, by the eager one, or (`none`) by neither. Steps count while all rows in the batch
decode; `share` is the median step's extra time over one without grammars. First tokens come from single requests with a
known grammar, by prompt length. FOLDER has the model family's tokenizer.json.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.library.measure import Results, engine_config, new_parser, percentiles
from benchmarks.library.models import CONFIGS, spec_of
from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.types import Grammar, GrammarSpec, Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.output.channel_grammar import channel_grammar, channel_marks
from runtime.output.options import ChatOptions
from runtime.structured.grammar import compiled
from runtime.structured.matching.automaton_policy import AutomatonPolicy
from runtime.text.tokenizer import Tokenizer
from runtime.text.vocabulary import Vocabulary
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource

NAMES = ("title", "summary", "author", "quote", "comment", "answer")
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in NAMES},
    "required": list(NAMES),
    "additionalProperties": False,
}


class Steps:
    """Batches of requests on one engine core."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.rng, self.count = runner, np.random.default_rng(0), 0
        self.core = build_engine(runner.config, runner.info, InProcess(runner))

    def run(self, batch: int, prompt_len: int, params: SamplingParams) -> tuple[float, list[float]]:
        """Seconds to the first output, and of the steps that gave a token to all rows."""
        core, seconds = self.core, []
        start = last = time.perf_counter()
        for prompt in self.rng.integers(0, 100_000, (batch, prompt_len)).tolist():
            self.count += 1
            core.add(Request(str(self.count), prompt, prompt_len, params, seed=self.count))
        first = 0.0
        while core.has_work:
            output = core.step()
            now = time.perf_counter()
            if output is not None:
                first = first or now - start
                if len(output.token_ids) == batch and all(len(s.tokens) > prompt_len + 8 for s in output.states):
                    seconds.append(now - last)
            last = now
        return first, seconds


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--batches", nargs="+", type=int, default=[64])
    parser.add_argument("--prompt-lens", nargs="+", type=int, default=[64, 1024], help="where first tokens are timed")
    parser.add_argument("--output", type=int, default=96, help="tokens of each answer, at most")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--channels", action="store_true", help="the grammar of a turn in channels")
    args = parser.parse_args()
    eos = CONFIGS[args.model]["eos_token_id"]
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    runner = build_runner(engine_config(args.set), DummySource(spec_of(args.model), eos_token_ids=eos_ids))
    tokenizer = Tokenizer.load(args.tokenizer)
    vocabulary = Vocabulary.of(tokenizer, runner.info)
    runner.masks.serve(lambda: vocabulary)
    spec = GrammarSpec("json", json.dumps(SCHEMA))
    if args.channels:
        marks = channel_marks(tokenizer)
        if marks is None:
            sys.exit(f"The tokenizer in {args.tokenizer} has no marks of channels.")
        spec = channel_grammar(ChatOptions(), marks, "header", True, None).spec
    grammar = compiled(spec)
    kinds: dict[str, Grammar | None] = {"none": None, "lazy": replace(grammar, key="lazy", expression="")}
    engines = runner.masks._engines.result() if runner.masks._engines is not None else None
    assert engines is not None
    engines.policy = AutomatonPolicy(0.0, 0)  # builds at once
    deadline = time.monotonic() + 60
    while engines.matcher(grammar).engine == "lazy" and time.monotonic() < deadline:
        time.sleep(0.1)
    if engines.matcher(grammar).engine == "eager":
        kinds["eager"] = grammar
    results, steps = Results("structured_steps", args.out), Steps(runner)
    params = {kind: SamplingParams(max_tokens=args.output, temperature=1.0, grammar=g) for kind, g in kinds.items()}
    firsts: dict[tuple[str, int], list[float]] = {(kind, n): [] for n in args.prompt_lens for kind in kinds}
    for _ in range(40):  # random order, because a GPU has slower clocks after a long prompt
        for kind, prompt_len in steps.rng.permutation(np.array([*firsts], object)).tolist():
            first, _ = steps.run(1, prompt_len, replace(params[kind], max_tokens=1))
            firsts[kind, prompt_len].append(first)
    for batch in args.batches:
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(args.repeats + 1):
            for kind in kinds:
                _, took = steps.run(batch, 16, params[kind])
                seconds[kind] += took if repeat else []
        plain = float(np.median(seconds["none"]))
        for kind in kinds:
            results.add(
                runner.config, model=args.model, engine=kind, batch=batch, steps=len(seconds[kind]),
                step_ms=percentiles(seconds[kind]), share=float(np.median(seconds[kind])) / plain - 1,
                first_token_ms={n: percentiles(firsts[kind, n]) for n in args.prompt_lens},
            )  # fmt: skip


if __name__ == "__main__":
    main()
