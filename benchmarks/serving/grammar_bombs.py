"""Harmful grammars, posted to a server while other clients stream: the effect on these.

    python -m benchmarks.serving.grammar_bombs --url http://127.0.0.1:8000

Streams decode alone, then while `--posters` clients post one bomb after another. Inter-token times are from one event
of a stream to its next. Each bomb must be answered within the deadline, by a 400 with a reason or by a right answer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.library.measure import Results, percentiles


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def bombs() -> list[dict[str, Any]]:
    """Fields of requests."""
    schemas = [
        nested(1000),
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}},
        {"$ref": "https://example.com/schema.json"},
        {"enum": [f"{i:0100d}" for i in range(10_000)]},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "object", "patternProperties": {f"^(a|aa){{{i}}}x$": {} for i in range(1, 60)}, "maxProperties": 9},
    ]
    patterns = ["(a+)+b", "(a|aa){50}", "x{1,100000}", "(?<=a)b", "((a{1,99}){1,99}){1,99}", "(a|b)*a(a|b){2000}"]
    return [
        *({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": s}}} for s in schemas),
        *({"structured_outputs": {"regex": pattern}} for pattern in patterns),
    ]


async def stream(client: httpx.AsyncClient, model: str, number: int, num_tokens: int, gaps: list[float]) -> None:
    body = {
        "model": model, "prompt": f"Story number {number}: once upon a time", "max_tokens": num_tokens, "stream": True,
        "ignore_eos": True, "temperature": 1.0, "seed": number,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        last = None
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def post_all(
    client: httpx.AsyncClient, model: str, first: int, answers: list[tuple[int, float]], stop: asyncio.Event
) -> None:
    kinds = [json.dumps(bomb) for bomb in bombs()]
    for i in itertools.count(first):
        if stop.is_set():
            return
        # A different one each time, so that no cache can answer.
        bomb = json.loads(kinds[i % len(kinds)].replace("99}", f"{90 + i % 9}}}").replace("2000", f"{2000 + i}"))
        body = {"model": model, "messages": [{"role": "user", "content": f"{i}"}], "max_tokens": 4}
        start = time.perf_counter()
        response = await client.post("/v1/chat/completions", json=body | bomb)
        answers.append((response.status_code, time.perf_counter() - start))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--posters", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="of each kind, in turn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.setrecursionlimit(20_000)  # a bomb is nested deeply
    results = Results("grammar_bombs", args.out)
    gaps: dict[str, list[float]] = {"alone": [], "bombs": []}
    answers: list[tuple[int, float]] = []
    async with httpx.AsyncClient(base_url=args.url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await asyncio.gather(*(stream(client, model, i, 16, []) for i in range(args.streams)))
        for round_ in range(args.rounds):
            for kind, found in gaps.items():
                stop = asyncio.Event()
                firsts = [round_ + 5 * i for i in range(args.posters if kind == "bombs" else 0)]
                posters = [asyncio.create_task(post_all(client, model, i, answers, stop)) for i in firsts]
                await asyncio.gather(*(stream(client, model, i, args.tokens, found) for i in range(args.streams)))
                stop.set()
                await asyncio.gather(*posters)
    seconds = [took for _, took in answers]
    results.add(
        streams=args.streams, posters=args.posters, bombs=len(answers),
        statuses={str(status): n for status, n in sorted(Counter(status for status, _ in answers).items())},
        answer_ms=percentiles(seconds), slowest_answer_s=max(seconds),
        alone_ms=percentiles(gaps["alone"]), with_bombs_ms=percentiles(gaps["bombs"]),
        p99_ratio=float(np.percentile(gaps["bombs"], 99) / np.percentile(gaps["alone"], 99)),
    )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
