"""The anatomy of a first token: where its milliseconds go, from a client's request to the first event of its answer.

    python -m benchmarks.first_token --serve ~/llama-3.2-3b --shape llama-3.2-3b
    python -m benchmarks.first_token --url http://127.0.0.1:8000

Requests of `--prompt-len` tokens follow one another over one connection. The client's clock gives the whole; the
server's own histograms (`GET /metrics`, before and after) give the parts, as means. With `--shape` the step of such a
prompt is timed in this process afterwards, on random weights of that shape. This gives the runner's host and device
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import sys
import time
import urllib.request
from statistics import mean, median

from benchmarks.library.measure import Engine, Results, engine_config, new_parser
from benchmarks.library.models import CONFIGS
from benchmarks.serving.__main__ import Draw, served
from serve_app.bench.client import Client, Turn

_PARTS = {  # histograms of the server, by part of the time
    "front": "callboard:ingress_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "step": "vllm:request_prefill_time_seconds",
    "server": "vllm:time_to_first_token_seconds",  # until the engine has it
    "back": "callboard:delivery_lag_seconds",  # of the last token, which takes the same way as the first
}


def histogram_sums(url: str) -> dict[str, tuple[float, float]]:
    """(sum in seconds, count) of each of `_PARTS` over all fronts and engines. Every front reports its counts to the
    engine once a second, so after two seconds all are there."""
    time.sleep(2)
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE))

    return {part: (total(f"{name}_sum"), total(f"{name}_count")) for part, name in _PARTS.items()}


async def ask_in_turn(url: str, turns: list[Turn]) -> None:
    """Send one request after another, each over the connection of the last."""
    client = Client(url)
    for turn in turns:
        await client.ask(turn)


def http_ms(url: str, count: int) -> float:
    """Median milliseconds of a request that a front answers without an engine, over a connection of its own."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            answer.read()
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


def step_alone_ms(shape: str, settings: list[str], prompt_len: int, count: int) -> float:
    """Median milliseconds until a request has its first token, with the engine's core and runner in this process."""
    engine = Engine(shape, engine_config(settings))
    return median([engine.run(1, prompt_len, 2).first for _ in range(count + 3)][3:]) * 1e3


def main() -> None:
    parser = new_parser(__doc__, model=False)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server, without /v1")
    where.add_argument("--serve", metavar="MODEL", help="start callboard serve with this model")
    parser.add_argument("--shape", choices=sorted(CONFIGS), help="time the step alone, too, on this shape")
    parser.add_argument("--prompt-len", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--output-len", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for callboard serve; must come last")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit that ends the server too
    draw, lengths = Draw(0), (args.prompt_len, args.prompt_len)
    outputs = args.output_len, args.output_len
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(served(args.serve, args.flags))
        asyncio.run(ask_in_turn(url, [draw.turn(lengths, outputs) for _ in range(8)]))
        turns, before = [draw.turn(lengths, outputs) for _ in range(args.requests)], histogram_sums(url)
        asyncio.run(ask_in_turn(url, turns))
        after, plain_http = histogram_sums(url), http_ms(url, args.requests)
    # This runs after the server has released the device.
    alone = step_alone_ms(args.shape, args.set, args.prompt_len, args.requests) if args.shape else None
    whole = [(turn.events[0] - turn.sent) * 1e3 for turn in turns]
    parts: dict[str, float] = {}
    for part in _PARTS:
        (sum_before, count_before), (sum_after, count_after) = before[part], after[part]
        if count_after - count_before != args.requests:
            sys.exit(f"{_PARTS[part]} counted {count_after - count_before:.0f} of {args.requests} requests; "
                     "measure a server that nobody else uses.")  # fmt: skip
        parts[part] = (sum_after - sum_before) / args.requests * 1e3
    rows = [
        ("client, HAProxy, HTTP of the front, there and back", mean(whole) - parts["server"] - parts["back"]),
        ("front: body, check, tokens", parts["front"]),
        ("submission, link to the engine", parts["server"] - parts["front"] - parts["queue"] - parts["step"]),
        ("engine: queue and plan", parts["queue"]),
        ("step channel, runner and device", parts["step"]),
        ("link back, text, event", parts["back"]),
    ]
    for name, ms in [*rows, ("the whole", mean(whole))]:
        print(f"{name:54}{ms:8.2f} ms", file=sys.stderr)
    around = mean(whole) - parts["step"]
    print(f"{'all but the step':54}{around:8.2f} ms", file=sys.stderr)
    if alone is not None:
        print(f"{'the step alone, in one process':54}{alone:8.2f} ms", file=sys.stderr)
    Results("first_token", args.out).add(
        None, served=args.serve or args.url, prompt_len=args.prompt_len, requests=args.requests,
        parts_ms=dict(rows), ttft_ms={"p50": median(whole), "mean": mean(whole)}, around_step_ms=around,
        step_alone_ms=alone, models_request_ms=plain_http,
    )  # fmt: skip


if __name__ == "__main__":
    main()
