"""Named workloads against an OpenAI-compatible server over HTTP and SSE, or against the bare engine in this process.

    python -m benchmarks.serving --serve /tmp/llama-3.2-3b                        # starts `callboard serve` itself
    python -m benchmarks.serving --url http://127.0.0.1:8000 --workloads burst256 # any server that takes token ids
    python -m benchmarks.serving --engine llama-3.2-3b                            # random weights, no HTTP
    python -m benchmarks.serving --serve /tmp/llama-3.2-3b --workloads sequential burst48 \
        --sampling '{"temperature": 0}' '{"temperature": 0.8, "top_p": 0.9}'      # each workload with each of them

Prompts are random token ids to /v1/completions, greedy unless `--sampling` names fields, EOS ignored. Time to first
token (TTFT) runs from the request's first byte to its first event. Inter-token latency (ITL) runs from one event to the
request's next. Output tok/s runs from the first request to the last answer's end. Arrivals are Poisson where
a rate is named, and the same in every run. A session's turns continue all earlier ones. The answers in between are
invented ids in the model's number, so only text that the client knows can be shared.

`sharegpt` sends all requests at once, `sharegpt16` 16 a second; total_tok_s counts input and output tokens.

A workload with long prompts reports them apart, as long_ttft_ms. Its other figures are the chats':

    python -m benchmarks.serving --engine qwen3.6-35b-a3b --workloads chats-alone 72k-alone chats-beside-72k \
        --repeats 1 --set max_model_len=80000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from benchmarks.library.measure import Engine, Results, engine_config, middle, new_parser
from benchmarks.library.models import CONFIGS
from benchmarks.library.servers import served
from runtime.base.types import Request, SamplingParams
from serve_app.bench.client import Client, Turn
from serve_app.bench.figures import figures
from serve_app.bench.load import Session, play

_IDS = (1000, 30000)  # every measured model's vocabulary has them
_LONG = 32_768  # tokens from which a prompt counts as long


class Draw:
    """Prompts, lengths and times; equal seeds give equal ones. Another `shift` gives prompts of the same lengths
    without common prefixes, so a server's prefix cache is cold for them."""

    def __init__(self, seed: int, shift: int = 0) -> None:
        self._rng, self._shift = np.random.default_rng(seed), shift

    def ids(self, low: int, high: int) -> list[int]:
        first, end = _IDS
        drawn = self._rng.integers(first, end, self._rng.integers(low, high + 1))
        return (first + (drawn - first + self._shift) % (end - first)).tolist()

    def turn(self, inputs: tuple[int, int], outputs: tuple[int, int], prefix: list[int] | None = None) -> Turn:
        return Turn((prefix or []) + self.ids(*inputs), int(self._rng.integers(outputs[0], outputs[1] + 1)))

    def requests(
        self, count: int, inputs: tuple[int, int], outputs: tuple[int, int], rate: float = 0.0, shared: int = 0,
        others: tuple[int, int] | None = None,
    ) -> list[Session]:  # fmt: skip
        """`count` single requests, `rate` a second or all at once. Their prompts begin with `shared` tokens in common;
        a quarter have lengths from `others`."""
        starts = np.cumsum(self._rng.exponential(1 / rate, count)) if rate else np.zeros(count)
        prefix = self.ids(shared, shared)
        kinds = [others if others and self._rng.random() < 0.25 else inputs for _ in range(count)]
        return [Session(float(s), [self.turn(k, outputs, prefix)]) for s, k in zip(starts, kinds, strict=True)]

    def chats_of_people(self, count: int, rate: float = 0.0) -> list[Session]:
        """`count` single requests with ShareGPT's mean lengths, 161 in and 338 out (Kwon et al., 2023, section 6.1).

        Lengths are drawn from a log-normal distribution with a deviation of one, at most 1,024 each. Their means are
        then about 155 and 290."""
        sessions = self.requests(count, (1, 1), (1, 1), rate)
        lengths = self._rng.lognormal(np.log([161.31, 337.99]) - 0.5, 1.0, (count, 2)).clip(4, 1024).astype(int)
        for session, (inputs, outputs) in zip(sessions, lengths.tolist(), strict=True):
            session.turns = [self.turn((inputs, inputs), (outputs, outputs))]
        return sessions

    def conversations(
        self, count: int, turns: tuple[int, int], news: tuple[int, int], outputs: tuple[int, int],
        pauses: tuple[float, float], shared: int, rate: float = 0.0,
    ) -> list[Session]:  # fmt: skip
        """Sessions of several `turns` that begin with `shared` tokens in common, `news` in each turn."""
        sessions = self.requests(count, news, outputs, rate, shared)
        for session in sessions:
            for _ in range(self._rng.integers(turns[0], turns[1] + 1) - 1):
                last = session.turns[-1]
                answer = self.ids(last.max_tokens, last.max_tokens)
                session.turns.append(self.turn(news, outputs, last.prompt + answer))
                session.turns[-1].pause = float(self._rng.uniform(*pauses))
        return sessions


def chats_and_long(draw: Draw, chats: int, long: int) -> list[Session]:
    """`chats` chats without a break, and `long` prompts with 72,000 tokens, one each 5 s."""
    sessions = [Session(0.0, [draw.turn((1024, 1024), (256, 256)) for _ in range(8)]) for _ in range(chats)]
    return sessions + [Session(2.0 + 5 * i, [draw.turn((72_000, 72_000), (16, 16))]) for i in range(long)]


WORKLOADS: dict[str, Callable[[Draw], list[Session]]] = {
    "sequential": lambda draw: [Session(0.0, [draw.turn((256, 256), (256, 256)) for _ in range(10)])],
    "steady": lambda draw: draw.requests(32, (64, 512), (64, 256), rate=4),
    "burst48": lambda draw: draw.requests(48, (128, 384), (128, 256)),
    "long-prompts": lambda draw: draw.requests(48, (1024, 2048), (64, 256), rate=6, others=(64, 512)),
    "shared-prefix": lambda draw: draw.requests(48, (64, 256), (64, 256), rate=8, shared=1024),
    "burst256": lambda draw: draw.requests(256, (256, 256), (128, 128)),
    "burst1024": lambda draw: draw.requests(1024, (256, 256), (128, 128)),
    # 8 agents: tools in common, then a tool's result a turn. 32 chats, 2 new ones a second, with people's pauses.
    "agents": lambda draw: draw.conversations(8, (10, 10), (100, 800), (40, 160), (0.05, 0.5), shared=2000),
    "chats": lambda draw: draw.conversations(32, (2, 6), (20, 200), (50, 250), (1.0, 4.0), shared=300, rate=2),
    "sharegpt": lambda draw: draw.chats_of_people(1000),
    "sharegpt16": lambda draw: draw.chats_of_people(320, rate=16),
    "chats-alone": lambda draw: chats_and_long(draw, 16, 0),
    "72k-alone": lambda draw: chats_and_long(draw, 0, 4),
    "chats-beside-72k": lambda draw: chats_and_long(draw, 16, 4),
}
DEFAULT = [name for name in WORKLOADS if not any(part in name for part in ("alone", "72k", "sharegpt"))]


async def play_over_http(sessions: list[Session], client: Client) -> None:
    """All sessions at their times, with a bar of the requests that are complete."""
    with tqdm(total=sum(len(s.turns) for s in sessions), unit="request", leave=False) as bar:

        async def ask(turn: Turn) -> None:
            await client.ask(turn)
            bar.update()

        await play(sessions, ask)


def play_on_engine(sessions: list[Session], engine: Engine, sampling: dict[str, float]) -> None:
    """The same without HTTP, text and processes: the engine alone."""
    core, clock = engine.core, time.perf_counter
    begin = clock()
    due = [(begin + session.start, i, 0) for i, session in enumerate(sessions)]
    heapq.heapify(due)
    with tqdm(total=sum(len(s.turns) for s in sessions), unit="request", leave=False) as bar:
        while due or core.has_work:
            while due and due[0][0] <= clock():
                _, session, at = heapq.heappop(due)
                turn = sessions[session].turns[at]
                turn.sent = clock()
                params = SamplingParams(max_tokens=turn.max_tokens, ignore_eos=True, **sampling)
                request = Request(f"{session}-{at}", list(turn.prompt), len(turn.prompt), params)
                core.add(request, owner=(session, at))
            if not core.has_work:
                time.sleep(max(0.0, due[0][0] - clock()))
                continue
            if (output := core.step()) is None:
                continue
            now = clock()
            for state in output.states:
                session, at = state.owner
                sessions[session].turns[at].events.append(now)
            for state, _ in output.finished:
                session, at = state.owner
                turns = sessions[session].turns
                turns[at].num_tokens, turns[at].ended = len(turns[at].events), now
                bar.update()
                if at + 1 < len(turns):
                    heapq.heappush(due, (now + turns[at + 1].pause, session, at + 1))


def figures_of(sessions: list[Session]) -> dict[str, float]:
    """The figures from one workload run; raises RuntimeError if tokens are missing."""
    turns = [turn for session in sessions for turn in session.turns]
    for turn in turns:
        if turn.num_tokens != turn.max_tokens:
            raise RuntimeError(f"{turn.num_tokens} tokens came where {turn.max_tokens} were asked for.")
    long = [turn for turn in turns if len(turn.prompt) >= _LONG]
    found = figures([turn for turn in turns if turn not in long] or long)
    latencies = {"ttft": "ttft_ms", "itl": "event_gap_ms"}
    percentiles = {f"{name}{p}": found[key][f"p{p}"] for name, key in latencies.items() for p in (50, 99)}
    if long:
        percentiles |= {f"long_ttft{p}": figures(long)["ttft_ms"][f"p{p}"] for p in (50, 99)}
    rate = found["output_tokens_per_s"]
    num_in, num_out = sum(len(turn.prompt) for turn in turns), sum(turn.num_tokens for turn in turns)
    whole = {} if long else {"total_tok_s": rate * (num_in + num_out) / num_out}
    return percentiles | whole | {"tok_s": rate, "tokens_per_event": found["tokens_per_event"]}


def main() -> None:
    parser = new_parser(__doc__, model=False)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server, without /v1")
    where.add_argument("--serve", metavar="MODEL", help="start callboard serve with this model")
    where.add_argument("--engine", choices=sorted(CONFIGS), help="no server: the engine in this process")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=DEFAULT)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each workload; medians are reported")
    parser.add_argument(
        "--sampling", nargs="+", type=json.loads, metavar="JSON", default=[{"temperature": 0.0}],
        help="sampling fields of the requests; each workload runs with each of them",
    )  # fmt: skip
    parser.add_argument("--label", default="", help="goes into the results: which server, which model")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for callboard serve; must come last")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit that ends the server too
    results = Results("serving", args.out)
    with contextlib.ExitStack() as stack:
        if args.engine:
            config = engine_config(args.set)
            engine = Engine(args.engine, config, paced=True)
            run = lambda sessions, sampling: play_on_engine(sessions, engine, sampling)  # noqa: E731
        else:
            config = None
            url = args.url or stack.enter_context(served(args.serve, args.flags))
            run = lambda sessions, sampling: asyncio.run(play_over_http(sessions, Client(url, sampling)))  # noqa: E731
        run(Draw(1 << 20).requests(64, (64, 512), (16, 64)), args.sampling[0])  # every batch size and length class once
        cells = list(itertools.product(args.workloads, enumerate(args.sampling)))
        for name, (shift, sampling) in tqdm(cells, unit="workload"):
            runs = []
            for seed in range(args.repeats):
                run(sessions := WORKLOADS[name](Draw(seed, shift)), sampling)
                runs.append(figures_of(sessions))
            found = {key: middle([figure[key] for figure in runs]) for key in runs[0]}
            long = {f"p{p}": found[f"long_ttft{p}"][0] for p in (50, 99) if f"long_ttft{p}" in found}
            results.add(
                config, model=args.engine or args.label or args.serve, workload=name, sampling=sampling,
                repeats=args.repeats, through="engine" if args.engine else "http",
                requests=sum(len(session.turns) for session in sessions),
                output_tok_s=found["tok_s"][0], output_range=found["tok_s"][1],
                ttft_ms={"p50": found["ttft50"][0], "p99": found["ttft99"][0]},
                itl_ms={"p50": found["itl50"][0], "p99": found["itl99"][0]},
                tokens_per_event=found["tokens_per_event"][0],
                **({"long_ttft_ms": long} if long else {"total_tok_s": found["total_tok_s"][0]}),
            )  # fmt: skip


if __name__ == "__main__":
    main()
