"""Updates of weights through an application, as a trainer sees them: the pause, and the longest gap of streams.

    python -m benchmarks.serving.updates MODEL                     # a folder of make_random_model; on a GPU by IPC
    python -m benchmarks.serving.updates MODEL --ways ipc nccl     # the second needs two GPUs
    python -m benchmarks.serving.updates --ways objects            # the default model on a CPU

The trainer is this process, with RolloutClient. While STREAMS requests decode, it sends all tensors of the model again.

    objects           Ray's object store
    ipc, ipc-packed   CUDA IPC handles, on the engine's GPU; of each tensor, or of buffers of 1 GiB
    nccl              broadcasts of 1 GiB, from the next GPU

One row an update. `total_s` is from `pause` to the end of `resume` (mode keep); without a pause, of the update alone.
`start_s`, `send_s` and `finish_s` are its calls. Three fields have the longest time between two tokens of a stream:

    longest_gap_s   around the update
    usual_gap_s     before it
    gap_after_s     in SETTLE_S after it, while the weights are stored
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import benchmarks.serving.front_door  # noqa: F401  # sets Ray's environment, before Ray is imported

import ray  # isort: skip
from ray import serve  # isort: skip

import torch

from actors.client import RolloutClient
from actors.ray.environment import quiet_port
from benchmarks.library.measure import Results
from runtime.base.config import DEFAULT_MODEL
from runtime.base.types import Request, SamplingParams
from runtime.loading.checkpoint import open_checkpoint
from runtime.loading.resolve import resolve
from runtime.updates.sending import NcclSender, ipc_update_info, ipc_update_infos, nccl_update_info

APP = "callboard"
SETTLE_S = 0.5  # of decoding before an update and after it


class Streams:
    """Requests that decode, and the times of their tokens."""

    def __init__(self, client: RolloutClient, num: int, prompt_len: int, num_tokens: int) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []
        self.times: list[list[float]] = [[] for _ in range(num)]
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        self._requests = [Request(f"s-{i}-0", [5 + i] * prompt_len, prompt_len, params, seed=i) for i in range(num)]

    async def _start(self) -> None:
        self._tasks = [asyncio.create_task(self._read(i)) for i in range(len(self._requests))]

    async def _read(self, i: int) -> None:
        async for output in self._client._group.generate(self._requests[i]):
            if output.token_ids:
                self.times[i].append(time.perf_counter())

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __enter__(self) -> Streams:
        self._client._thread.call(self._start())
        while not all(self.times):
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._client._thread.call(self._end())

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time between two tokens of a stream that overlaps these times."""
        gaps = [0.0]
        for times in self.times:
            pairs = zip(times, [*times[1:], time.perf_counter()], strict=True)
            gaps += [b - a for a, b in pairs if b > begin and a < end]
        return max(gaps)


class Trainer:
    """Weights in this process, and the calls that send them."""

    def __init__(self, client: RolloutClient, folder: Path, way: str, dtype: str | None) -> None:
        self._client, self._way = client, way
        checkpoint = open_checkpoint(folder)
        device = torch.device("cpu" if way == "objects" else "cuda:1" if way == "nccl" else "cuda:0")
        self.tensors = {
            name: checkpoint.tensor(name, getattr(torch, dtype) if dtype else checkpoint.dtype(name), device)
            for name in checkpoint.names()
        }
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._sender: NcclSender | None = None
        if way == "nccl":
            self._sender = NcclSender("127.0.0.1", 1 + self._world_size(), device=device, packed=True)
            joining = threading.Thread(target=self._sender.connect)
            joining.start()
            self.call("init", {"init_info": self._sender.init_info})
            joining.join()

    def _world_size(self) -> int:
        return sum(answer["world_size"] for answer in self.call("info", {}).values())

    def call(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client._weights(call, body)

    def send(self) -> None:
        """All tensors, as one call of an open update."""
        if self._way == "objects":
            from actors.client.weight_sources import parts_of

            for part in parts_of(self.tensors, "objects", "", None):
                self.call("update", {"parts": [part]})
            return
        if self._sender is None:
            packed = self._way == "ipc-packed"
            for info in ipc_update_infos(self.tensors.items()) if packed else [ipc_update_info(self.tensors.items())]:
                self.call("update", {"update_info": dict(info)})
                info.close()
            return
        sending = threading.Thread(target=self._sender.send, args=(self.tensors.items(),))
        sending.start()
        self.call("update", {"update_info": nccl_update_info(self.tensors.items())})
        sending.join()

    def update(self, pauses: bool, kv: str) -> dict[str, float]:
        """Return the seconds of each call."""
        steps: list[tuple[str, Callable[[], object]]] = [
            ("start_s", lambda: self.call("start", {})),
            ("send_s", self.send),
            ("finish_s", lambda: self.call("finish", {"kv": kv})),
        ]
        if pauses:
            steps.insert(0, ("pause_s", lambda: self.call("pause", {"mode": "keep"})))
            steps.append(("resume_s", lambda: self.call("resume", {})))
        seconds, begin = {}, time.perf_counter()
        for name, step in steps:
            start = time.perf_counter()
            step()
            seconds[name] = time.perf_counter() - start
        return seconds | {"total_s": time.perf_counter() - begin}


def rows(args: argparse.Namespace, client: RolloutClient, way: str) -> Iterator[dict[str, Any]]:
    """One row for each update by a way."""
    trainer = Trainer(client, resolve(args.model, None), way, args.dtype)
    for pauses in (True, False):
        for kv in args.kv:
            for repeat in range(args.repeats + 1):
                with Streams(client, args.streams, args.prompt_len, args.tokens) as streams:
                    before = time.perf_counter()
                    time.sleep(SETTLE_S)
                    begin = time.perf_counter()
                    usual = streams.longest_gap(before, begin)
                    seconds = trainer.update(pauses, kv)
                    end = time.perf_counter()
                    time.sleep(SETTLE_S)
                    gap, after = streams.longest_gap(begin, end), streams.longest_gap(end, time.perf_counter())
                start = time.perf_counter()
                while not all(answer["stored"] for answer in trainer.call("info", {}).values()):
                    time.sleep(0.02)
                stored = time.perf_counter() - start
                if repeat:  # the first one warms up
                    yield {
                        "way": way, "dtype": args.dtype or "stored", "pauses": pauses, "kv": kv, **seconds,
                        "gb": trainer.num_bytes / 1e9, "longest_gap_s": gap, "usual_gap_s": usual,
                        "gap_after_s": after, "stored_after_s": stored + SETTLE_S,
                    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--ways", nargs="+", choices=["objects", "ipc", "ipc-packed", "nccl"], default=None)
    parser.add_argument("--dtype", help="of the trainer's tensors, such as bfloat16; default: the checkpoint's")
    parser.add_argument("--kv", nargs="+", choices=["keep", "recompute"], default=["keep", "recompute"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048, help="of a stream; it must last longer than an update")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="settings of the application")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    args = parser.parse_args()
    from callboard.app import AppArgs, build_app

    results, on_gpu = Results("weight_updates_served", args.out), torch.cuda.is_available()
    settings = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in args.set)}
    settings = {"weight_updates": True, "num_fronts": 1} | ({} if on_gpu else {"quantization": "none"}) | settings
    with ExitStack() as stack:
        ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        serve.start(
            http_options={"host": "127.0.0.1", "port": quiet_port()}, logging_config={"enable_access_log": False}
        )
        stack.callback(serve.shutdown)
        serve.run(build_app(AppArgs(model=args.model, **settings)), name=APP)
        client = stack.enter_context(RolloutClient.connect(APP))
        for way in args.ways or (["ipc"] if on_gpu else ["objects"]):
            for row in rows(args, client, way):
                results.add(model=args.model, streams=args.streams, set=args.set, **row)
    sys.exit(0)


if __name__ == "__main__":
    main()
