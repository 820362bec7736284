"""A long prompt, `kill -9` to its engine and runner, and the conversation's next turn.

    callboard serve Qwen/Qwen3-0.6B
    python -m benchmarks.faults.tier_demo --tokens 8000

It prints the time to the first token before and after.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from contextlib import suppress

import httpx

from serve_app.processes.application_processes import local_port, processes_of, session_behind


def ask(client: httpx.Client, prompt: list[int], what: str) -> int:
    """Print the time to the first token of an answer, and return the token."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    while True:  # until an engine is there; only its own time counts
        begun = time.perf_counter()
        with suppress(httpx.TransportError):
            answer = client.post("/v1/completions", json=body)
            if answer.status_code == 200:
                break
        time.sleep(0.05)
    seconds, found = time.perf_counter() - begun, answer.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    print(f"{what:<42} {seconds:8.3f} s   {cached:7,} of {len(prompt):,} tokens cached")
    return int(found["choices"][0]["token_ids"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--tokens", type=int, default=8000)
    args = parser.parse_args()
    prompt, turn = ([random.randrange(300, 3000) for _ in range(count)] for count in (args.tokens, 50))
    with httpx.Client(base_url=args.url, timeout=3600) as client:
        prompt.append(ask(client, prompt, "computed"))
        ask(client, prompt + turn, "the next turn, on the same engine")
        time.sleep(1)  # the tier has the last blocks by then
        for process in processes_of(session_behind(local_port(args.url))):
            if process.role in ("engine", "runner"):
                process.send(signal.SIGKILL)
                print(f"kill -9 {process.pid} ({process.role})")
        killed = time.perf_counter()
        ask(client, turn, "a short prompt, to wait for a new engine")
        print(f"whole again after {time.perf_counter() - killed:.1f} s")
        ask(client, prompt + turn[:-1], "the next turn, after the kill")
        ask(client, prompt[::-1] + turn, "another prompt as long: computed")


if __name__ == "__main__":
    main()
