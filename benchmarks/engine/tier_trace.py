"""Hits of the tier's index on a recorded trace, next to an exact LRU with as many entries.

    python -m benchmarks.engine.tier_trace mooncake_conversation.jsonl.gz --seconds 60 250 600

Each line is a request: `timestamp` in milliseconds, and `hash_ids`, one for each `--trace-block` prompt tokens. The
region's entries have `--block` tokens. It holds the average traffic of `--seconds`, without payloads. Requests follow
one another at once. Each looks up its prompt, touches the hit, stores the rest, and touches the whole prompt.

    | figure | what |
    | --- | --- |
    | hits, lru_hits | share of all prompt tokens in the longest known prefix: region, LRU |
    | of_lru | the region's hits over the LRU's |
    | most_hits | the same without a limit of memory |
    | find_ms, reserve_ms | a call for one request |
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
import time
from collections import OrderedDict
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.library.measure import Results, new_parser, percentiles
from runtime.tier.region import Region

_SLOT_BYTES = 8


class IndexReplay:
    """A region without payloads: requests look up their prompts and store the missing entries."""

    def __init__(self, folder: Path, num_entries: int, per_hash: int) -> None:
        self._region = Region.open(folder / "trace", "trace", num_entries, _SLOT_BYTES, 1)
        self._per_hash = per_hash
        self.find_s: list[float] = []
        self.reserve_s: list[float] = []

    def hits(self, hashes: list[int]) -> float:
        """Return the length of the known prefix in hashes, and store the rest."""
        keys, region = b"".join(map(self._keys, hashes)), self._region
        begin = time.perf_counter()
        found = region.find(keys)
        self.find_s.append(time.perf_counter() - begin)
        count = len(found) if found.all() else int(found.argmin())
        region.touch(keys[: 16 * count])
        begin = time.perf_counter()
        taken = region.reserve(rest := keys[16 * count :], 0)
        self.reserve_s.append(time.perf_counter() - begin)
        own = np.frombuffer(rest, "V16")[taken].tobytes()
        region.commit(0, region.slots_of(own, ready=False), own, np.zeros(len(own) // 16, np.uint64))
        region.touch(keys)
        return count / self._per_hash

    def _keys(self, number: int) -> bytes:
        """Return the keys for one of the trace's hashes."""
        return hashlib.shake_128(number.to_bytes(8, "little")).digest(16 * self._per_hash)

    def close(self) -> None:
        self._region.close()
        self._region.wipe(self._region.folder)


class LeastRecentlyUsed:
    """An exact LRU of hashes. A prompt's first hashes are its most recent ones."""

    def __init__(self, capacity: float) -> None:
        self._capacity, self._order = capacity, OrderedDict[int, None]()

    def hits(self, hashes: list[int]) -> float:
        """Return the length of the known prefix in hashes, and store the rest."""
        count = sum(1 for _ in takewhile(self._order.__contains__, hashes))
        for number in reversed(hashes):
            self._order[number] = None
            self._order.move_to_end(number)
        while len(self._order) > self._capacity:
            self._order.popitem(last=False)
        return count


def read(path: Path, limit: int | None) -> tuple[list[list[int]], float]:
    """Return the hashes of each request, and the seconds from the first one to the last one."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        lines = [json.loads(line) for line in islice(file, limit)]
    times = [line["timestamp"] for line in lines]
    return [line["hash_ids"] for line in lines], (max(times) - min(times)) / 1e3


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("trace", type=Path, help="JSON lines, perhaps compressed by gzip")
    parser.add_argument("--seconds", nargs="+", type=float, default=[600.0], help="traffic that the region holds")
    parser.add_argument("--block", type=int, default=16, metavar="TOKENS", help="tokens in an entry")
    parser.add_argument("--trace-block", type=int, default=512, metavar="TOKENS", help="tokens that a hash stands for")
    parser.add_argument("--requests", type=int, help="read no more lines than this")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="place for the index")
    args = parser.parse_args()
    requests, duration = read(args.trace, args.requests)
    results, total = Results("tier_trace", args.out), sum(map(len, requests))
    unlimited = LeastRecentlyUsed(total)
    most = sum(map(unlimited.hits, requests)) / total
    for seconds in args.seconds:
        capacity = total * min(1.0, seconds / duration)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            per_hash = args.trace_block // args.block
            replay = IndexReplay(Path(folder), int(capacity * per_hash), per_hash)
            hits = sum(map(replay.hits, tqdm(requests, f"{seconds:.0f} s", unit="request"))) / total
            replay.close()
        exact = LeastRecentlyUsed(capacity)
        lru = sum(map(exact.hits, requests)) / total
        results.add(
            trace=args.trace.name, requests=len(requests), seconds=seconds, tokens=capacity * args.trace_block,
            block=args.block, hits=hits, lru_hits=lru, of_lru=hits / lru if lru else 1.0, most_hits=most,
            find_ms=percentiles(replay.find_s), reserve_ms=percentiles(replay.reserve_s),
        )  # fmt: skip


if __name__ == "__main__":
    main()
