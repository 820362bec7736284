"""The time of a weight update on one runner, stage by stage; random weights.

    python -m benchmarks.weight_updates                    # a 1B and an 8B, by all ways that this machine has
    python -m benchmarks.weight_updates --shapes llama-3.1-8b --ways ipc nccl --repeats 5
    python -m benchmarks.weight_updates --shapes tiny      # tries it on a CPU

The ways:

    ipc, ipc-packed     a trainer's process on the runner's GPU; a handle for each tensor, or for buffers of 1 GiB
    nccl, nccl-single   a trainer's process on the next GPU; packed in buffers, or a broadcast for each tensor
    arrays              tensors of this process, in host memory
    files               the checkpoint's own files, in the page cache

`export_s` is the trainer's time until handles exist. `receive_s`, `check_s`, `apply_s` and `keep_s` are the runner's.
`peak_gb` is the most that torch allocated on the runner's GPU, less its allocation before the update. The folders of
models are made in `--folders` if they are absent. The runner's store is there, too.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.library.measure import Results, engine_config, new_parser
from benchmarks.library.models import CONFIGS
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.weight_parts import ArraysPart, FilesPart, WeightPart
from runtime.loading.checkpoint import open_checkpoint
from runtime.updates.sending import NcclSender, ipc_update_info, ipc_update_infos, nccl_update_info
from runtime.updates.update_info import group_of_init_info, part_of_json
from runtime.worker.sources import CheckpointSource

_T = TypeVar("_T")
_TRAINER_S = 600.0  # at most, for an answer of the trainer
_GB = 1e9
WAYS = ("ipc", "ipc-packed", "nccl", "nccl-single", "arrays", "files")
SHAPES = ("llama-3.2-1b", "llama-3.1-8b")


def drawn(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Random weights with the names, types and shapes of a checkpoint."""
    checkpoint = open_checkpoint(folder)
    generator = torch.Generator(device).manual_seed(1)
    return {
        name: torch.empty(checkpoint.shape(name), dtype=checkpoint.dtype(name), device=device).normal_(
            0, 0.02, generator=generator
        )
        for name in checkpoint.names()
    }


def train(connection: Connection, folder: Path, way: str) -> None:
    """The trainer's process. It changes its weights and sends them, each time that a message comes."""
    device = torch.device("cuda", 1 if way.startswith("nccl") else 0)
    torch.cuda.set_device(device)
    weights = drawn(folder, device)
    sender = None
    if way.startswith("nccl"):
        sender = NcclSender("127.0.0.1", 2, device=device, packed=way == "nccl")
        connection.send(sender.init_info)
        sender.connect()
    connection.send(nccl_update_info(weights.items()))
    while connection.recv() == "update":
        for tensor in weights.values():
            tensor.mul_(1.01)
        torch.cuda.synchronize()
        start = time.perf_counter()
        if sender is not None:
            connection.send((None, 0.0))
            sender.send(weights.items())
        else:
            packed = way == "ipc-packed"
            parts = ipc_update_infos(weights.items()) if packed else iter([ipc_update_info(weights.items())])
            for part in parts:
                connection.send((dict(part), time.perf_counter() - start))
                connection.recv()  # the reply
                part.close()
                start = time.perf_counter()
        connection.send(None)


class Trainer:
    """A trainer's process, and the parts that it sends."""

    def __init__(self, folder: Path, way: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._way = way
        self.process = context.Process(target=train, args=(theirs, folder, way), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        if not self._ours.poll(_TRAINER_S):
            sys.exit(f"The trainer did not answer within {_TRAINER_S:g} s.")
        try:
            return self._ours.recv()
        except EOFError:
            sys.exit("The trainer's process ended; its error is above.")

    def connect(self, updates: Any) -> float:
        """Join the trainer's group if it has one, and wait until it has its weights. Returns the seconds of a join."""
        seconds = 0.0
        if self._way.startswith("nccl"):
            group = group_of_init_info(self.answer(), 0)
            seconds = timed(updates.connect, group)[0]
        self._announced = self.answer()
        return seconds

    def parts(self) -> Iterator[tuple[WeightPart, float]]:
        """The parts of the next update, and the seconds of their exports."""
        self._ours.send("update")
        while (answer := self.answer()) is not None:
            update_info, export_s = answer
            yield part_of_json(update_info or self._announced), export_s
            if not self._way.startswith("nccl"):
                self._ours.send("reply")

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def timed(work: Callable[..., _T], *arguments: Any) -> tuple[float, _T]:
    """The seconds of a call until the GPU is idle, and its result."""
    start = time.perf_counter()
    result = work(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


@contextlib.contextmanager
def updates_of(way: str, folder: Path, updates: Any) -> Iterator[Callable[[], Iterable[tuple[WeightPart, float]]]]:
    """A function that returns the parts of the next update, with the seconds of their exports."""
    if way == "files":
        yield lambda: [(FilesPart([str(folder)]), 0.0)]
        return
    if way == "arrays":
        weights = drawn(folder, torch.device("cpu"))
        yield lambda: [(ArraysPart({**weights}), 0.0)]
        return
    trainer = Trainer(folder, way)
    try:
        join_s = trainer.connect(updates)
        if join_s:
            print(f"the runner joined the trainer's group in {join_s:.2f} s", file=sys.stderr)
        yield trainer.parts
    finally:
        updates.disconnect()
        trainer.end()


def measure(way: str, folder: Path, config: EngineConfig, repeats: int) -> Iterator[dict[str, Any]]:
    """Update a runner several times by one way."""
    updates: Any = build_runner(config, CheckpointSource(folder)).updates
    if updates is None:
        sys.exit("The runner takes no weight updates; set weight_updates=true.")
    checkpoint = open_checkpoint(folder)
    size = sum(
        torch.Size(checkpoint.shape(name)).numel() * checkpoint.dtype(name).itemsize for name in checkpoint.names()
    )
    memory = Memory()
    with updates_of(way, folder, updates) as next_parts:
        for repeat in range(1, repeats + 1):
            memory.start()
            export_s = receive_s = 0.0
            for part, seconds in next_parts():
                export_s += seconds
                receive_s += timed(updates.receive, part)[0]
            check_s, is_complete = timed(updates.check)
            staged = memory.allocated()
            version = updates.version.after(f"{way}-{repeat}", None, is_complete)
            apply_s, _ = timed(updates.apply, version)
            peak = memory.peak()
            keep_s, _ = timed(updates.store)
            yield {
                "way": way, "repeat": repeat, "gb": size / _GB, "is_complete": is_complete,
                "export_s": export_s, "receive_s": receive_s, "receive_gb_s": size / _GB / receive_s,
                "check_s": check_s, "apply_s": apply_s, "keep_s": keep_s,
                "peak_gb": peak / _GB, "staged_gb": staged / _GB, "left_gb": memory.allocated() / _GB,
            }  # fmt: skip


class Memory:
    """The bytes that torch allocated on the runner's GPU since `start`; 0 on a CPU."""

    def __init__(self) -> None:
        self._on_gpu, self._before = torch.cuda.is_available(), 0

    def start(self) -> None:
        if self._on_gpu:
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() - self._before if self._on_gpu else 0

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before if self._on_gpu else 0


def model_folder(folders: Path, shape: str) -> Path:
    """The folder of a shape, made once."""
    folder = folders / shape
    if not (folder / "model.safetensors.index.json").exists():
        print(f"making {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "benchmarks.library.make_random_model", shape, str(folder)], check=True)
    return folder


def in_own_process(shape: str, way: str, folder: Path, args: argparse.Namespace, results: Results) -> bool:
    """Measure in a process, which gives back all GPU memory. Returns False if it failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, shape, way, folder, args))
    process.start()
    theirs.close()
    with contextlib.suppress(EOFError):
        while True:
            config, row = ours.recv()
            results.add(config, **row)
    process.join()
    if process.exitcode:
        print(f"failed: {shape}, {way} (exit code {process.exitcode})", file=sys.stderr, flush=True)
    return not process.exitcode


def _measure(connection: Connection, shape: str, way: str, folder: Path, args: argparse.Namespace) -> None:
    room = {"num_kv_blocks": 2048, "max_model_len": 4096, "max_num_seqs": 32} if torch.cuda.is_available() else {}
    with tempfile.TemporaryDirectory(dir=args.folders, prefix="store-") as store:
        config = engine_config(args.set, **{"model": shape, "weight_updates": True, "weight_store": store} | room)
        for row in measure(way, folder, config, args.repeats):
            connection.send((config, {"model": shape} | row))


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--shapes", nargs="+", choices=sorted(CONFIGS), default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all that this machine has")
    parser.add_argument("--repeats", type=int, default=3, help="updates by each way")
    parser.add_argument("--folders", type=Path, default=Path("/dev/shm/callboard-models"), help="of random models")
    args = parser.parse_args()
    args.folders.mkdir(parents=True, exist_ok=True)
    results, num_gpus, are_ok = Results("weight_updates", args.out), torch.cuda.device_count(), True
    ways = args.ways or [
        way for way in WAYS if num_gpus >= (2 if way.startswith("nccl") else 1 if way.startswith("ipc") else 0)
    ]
    for shape in args.shapes:
        folder = model_folder(args.folders, shape)
        for way in ways:
            are_ok &= in_own_process(shape, way, folder, args, results)
    sys.exit(0 if are_ok else 1)


if __name__ == "__main__":
    main()
