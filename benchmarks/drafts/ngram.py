"""Speculation by n-gram lookup on a CPU: SmolLM2-135M with and without it, one request at a time, in alternation.

    python -m benchmarks.drafts.ngram [--repeats 3] [--tokens 128]
    python -m benchmarks.drafts.ngram --replay texts.json      # drafts for recorded texts, by STEP_US

Tokens per second of this process's CPU time, prefill included, on one thread, so other work on the machine does not
count. Both must give the same tokens, or it fails.

A replay gives the same counts on every machine. Its texts are files that an agent writes again with changes, and the
model's own answers.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from pathlib import Path

from runtime.base.types import MAX_MATCHED_TOKENS, CallboardError, FinishReason, Request, SamplingParams
from runtime.core.request_state import RequestState, RequestStatus
from runtime.llm import LLM
from runtime.speculation.choose_k import Speculation, StepTimes
from runtime.speculation.ngram import Ngram

_FUNCTION = "def add_{0}(stock, count):\n    stock['{0}'] = stock.get('{0}', 0) + count\n    return stock\n\n"
_FILE = """class Shelf:
    def __init__(self, name, width):
        self.name = name
        self.width = width
        self.books = []

    def add(self, book):
        if book.width > self.free_width():
            raise ValueError(f"{book.title} does not fit on {self.name}")
        self.books.append(book)

    def free_width(self):
        return self.width - sum(book.width for book in self.books)

    def find(self, title):
        for book in self.books:
            if book.title == title:
                return book
        return None
"""
PROMPTS = {
    "code with a pattern": "".join(map(_FUNCTION.format, ("apples", "pears", "plums"))) + "def add_cherries(",
    "a numbered list": "1. The first item costs 10 dollars.\n2. The second item costs 20 dollars.\n3.",
    "prose": "The old theatre at the end of the street had been closed for years when",
    "a file, again": f"shelf.py:\n```\n{_FILE}```\n\nThe same file once more:\n```\n{_FILE[:60]}",
}
STEP_US = (1, 8300.0), (2, 9100.0), (4, 12500.0), (8, 16600.0), (16, 27600.0)  # SmolLM2-135M, float32, one thread
_EDITED = "core/scheduler.py", "core/step.py", "speculation/choose_k.py", "base/config.py"
_CHANGES = ("state", "request"), ("step", "plan"), ("count", "number"), ("return", "return  "), ("self.", "this.")


def edits(tokens_of_file: int = 2000) -> list[tuple[str, str]]:
    """Prompts and outputs: each file is written again with a few changes, and then again with others."""
    found = []
    for name in _EDITED:
        text = (Path("runtime") / name).read_text()[: 4 * tokens_of_file]
        prompt = text
        for turn in range(2):
            lines = text.splitlines(keepends=True)
            for i, change in enumerate(_CHANGES):
                at = (37 * i + 11 * turn) % len(lines)
                lines[at : at + 8] = [line.replace(*change) for line in lines[at : at + 8]]
            text = "".join(lines)
            found.append((prompt, text))
            prompt += text
    return found


def recorded(path: Path, num_tokens: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return pairs of a prompt and an output by name: edits, and the model's own answers. They are kept at `path`."""
    if path.exists():
        return json.loads(path.read_text())
    llm = LLM(dtype="float32", num_threads=1, kv_cache_memory=0.1)
    encode = llm.tokenizer.encode
    found = {"edits of files": [(encode(prompt), encode(output)) for prompt, output in edits()]}
    for name, prompt in PROMPTS.items():
        for temperature in (0.0, 0.7):
            params = SamplingParams(max_tokens=num_tokens, temperature=temperature, ignore_eos=True, seed=1)
            (answer,) = llm.generate(prompt, params, progress=False)
            found[f"{name}, {temperature}"] = [(answer.prompt_token_ids, answer.token_ids)]
    path.write_text(json.dumps(found))
    return found


def replay(pairs: list[tuple[list[int], list[int]]], most: int) -> tuple[float, float, int, int, float]:
    """Return tokens a step, the speed over none, right and all draft tokens, and CPU time a step in microseconds.

    A row has up to `most` draft tokens."""
    speculation, step_us = Speculation(Ngram(0, most), None, STEP_US, 0.0), StepTimes(STEP_US).us
    right = drafted = num_steps = 0
    took_us, start = 0.0, time.process_time()
    for number, (prompt, output) in enumerate(pairs):
        request = Request(str(number), prompt, len(prompt), SamplingParams(), seed=0)
        state, at = RequestState(request, array("i", prompt), 1 << 30, frozenset(), (0, 0, 0)), 0
        state.status = RequestStatus.RUNNING
        while at < len(output):
            state.rewind()
            speculation.begin_step([state])
            guess = speculation.drafts(state, 100) if speculation.is_drafting else []
            same = next((i for i, pair in enumerate(zip(guess, output[at:], strict=False)) if pair[0] != pair[1]), None)
            count = min(len(guess), len(output) - at) if same is None else same
            if guess:
                speculation.on_verified(state, count, same is not None)
            state.tokens.extend(output[at : at + count + 1])
            at += count + 1
            num_steps, drafted, right = num_steps + 1, drafted + len(guess), right + count
            took_us += step_us(1 + len(guess))
        speculation.on_end(state, FinishReason.LENGTH)
    num_tokens = sum(len(output) for _, output in pairs)
    cpu_us = (time.process_time() - start) / num_steps * 1e6
    return num_tokens / num_steps, num_tokens * step_us(1) / took_us, right, drafted, cpu_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed answers of each prompt, after one to warm up")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--most", type=int, default=MAX_MATCHED_TOKENS, help="draft tokens of a replayed row")
    parser.add_argument("--replay", type=Path, help="a file of recorded texts; it is made if it is missing")
    args = parser.parse_args()
    if args.replay is not None:
        print("| text | tokens a step | speed | right of drafted | us of CPU time a step |\n" + "|---" * 5 + "|")
        for name, pairs in recorded(args.replay, args.tokens).items():
            rate, speed, right, drafted, cpu_us = replay(pairs, args.most)
            print(f"| {name} | {rate:.2f} | {speed:.2f} | {right} of {drafted} | {cpu_us:.1f} |")
        return
    config = {"dtype": "float32", "num_threads": 1, "kv_cache_memory": 0.1, "prefix_cache": False}
    llms = [LLM(draft=draft, **config) for draft in (None, "ngram")]
    stats = llms[1].engine.scheduler.stats
    print("| prompt | temperature | off, tok/s | n-gram, tok/s | ratio | accepted of guessed |\n" + "|---" * 6 + "|")
    for name, prompt in PROMPTS.items():
        for temperature in (0.0, 0.7):
            seconds, answers = [0.0, 0.0], [[], []]  # plain, drafted
            for seed in range(args.repeats + 1):
                if seed == 1:
                    seconds = [0.0, 0.0]
                    num_accepted, num_guessed = stats.accepted_draft_tokens, stats.draft_tokens
                params = SamplingParams(max_tokens=args.tokens, temperature=temperature, ignore_eos=True, seed=seed)
                for i, llm in enumerate(llms):
                    start = time.process_time()
                    answers[i].append(llm.generate(prompt, params, progress=False)[0].token_ids)
                    seconds[i] += time.process_time() - start
            if answers[0] != answers[1]:
                raise CallboardError(f"Guesses changed the tokens of {name!r} at temperature {temperature}.")
            off, on = (args.repeats * args.tokens / s for s in seconds)
            accepted, guessed = stats.accepted_draft_tokens - num_accepted, stats.draft_tokens - num_guessed
            print(f"| {name} | {temperature} | {off:.1f} | {on:.1f} | {on / off:.2f} | {accepted} of {guessed} |")


if __name__ == "__main__":
    main()
