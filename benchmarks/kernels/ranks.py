"""Time of an all-reduce between ranks, each a process with a GPU of its own.

    python -m benchmarks.kernels.ranks --gpus 2 --out OUT.jsonl
    python -m benchmarks.kernels.ranks --gpus 2 --masked        # each process sees its own GPU alone
    python -m benchmarks.kernels.ranks --gpus 2 --soak 10000    # and checks the totals of a million sums
    python -m benchmarks.kernels.ranks --soak 10000             # the same on two streams of one GPU

Bfloat16 is added to a residual by graphs of several launches back to back; medians of the replays, the slowest rank's.
NCCL in such a graph is timed in the same run (--nccl).
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from statistics import median

import torch

from benchmarks.library.measure import Results, new_parser
from runtime.kernels.collectives.inboxes import NUM_PROGRAMS
from runtime.worker.ranks.peer_memory import PeerMemory, inbox_bytes_of

SIZES = [8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20]
_WIDTH = 4096


def graph_of(launch: Callable[[], object], num_bytes: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of all-reduces, and their number. It runs one of them first, in which all ranks must take part."""
    launches = max(2, min(100, (64 << 20) // num_bytes))
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    return graph, launches


def replay_us(graph: torch.cuda.CUDAGraph, launches: int, replays: int = 20) -> float:
    """The time of one launch, while the other ranks replay as often."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events[2:]) / launches * 1e3


def run_rank(
    pipe: Connection, rank: int, size: int, sizes: list[int], num_programs: int, masked: bool, nccl: bool
) -> None:
    if masked:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    torch.cuda.set_device(0 if masked else rank)
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = PeerMemory(rank, size, inbox_bytes_of(size, max(sizes)), device, timeout_s=30.0, num_programs=num_programs)
    pipe.send(ranks.handle)
    start = time.perf_counter()
    ranks.connect(pipe.recv())
    pipe.send(time.perf_counter() - start)
    if nccl:
        address = "tcp://127.0.0.1:29571"
        torch.distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=size, device_id=device)
    for num_bytes in sizes:
        x = torch.randn(num_bytes // 2 // _WIDTH, _WIDTH, device="cuda").bfloat16()
        residual = torch.zeros_like(x)
        us = replay_us(*graph_of(partial(ranks.add_reduced, residual, x), num_bytes))
        ranks.check()
        all_reduce = partial(torch.distributed.all_reduce, torch.zeros_like(x))
        pipe.send((us, replay_us(*graph_of(all_reduce, num_bytes)) if nccl else None))
    os._exit(0)  # NCCL's threads need not be stopped


def over_links(size: int, sizes: list[int], num_programs: int, masked: bool, nccl: bool, results: Results) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    for rank, (_, theirs) in enumerate(pipes):
        context.Process(
            target=run_rank, args=(theirs, rank, size, sizes, num_programs, masked, nccl), daemon=True
        ).start()
    handles = [ours.recv() for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(handles)
    results.add(kernel="connect", cell=size, us=max(ours.recv() for ours, _ in pipes) * 1e6)
    for num_bytes in sizes:
        found = [ours.recv() for ours, _ in pipes]
        library = max(us for _, us in found) if nccl else None
        us = max(us for us, _ in found)
        results.add(kernel=f"all-reduce, {num_bytes >> 10} KB", cell=size, us=us, library_us=library)


def soak(num_gpus: int, num_replays: int) -> None:
    """Replays of graphs of 100 sums, after random delays; AssertionError where a total is wrong."""
    from tests.support.ranks.communicator_processes import answer_of, communicator_processes
    from tests.support.ranks.gpu_ranks import make_apart, replay_in_processes, replay_on_streams

    if not num_gpus:
        replay_on_streams(num_replays, 100)
        return
    replay = partial(replay_in_processes, num_replays=num_replays, num_sums=100)
    with communicator_processes(num_gpus, make_apart, replay) as ranks:
        assert [answer_of(rank) for rank in ranks] == ["equal"] * num_gpus


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--gpus", type=int, default=0, help="ranks, each on a GPU")
    parser.add_argument("--masked", action="store_true", help="CUDA_VISIBLE_DEVICES of each rank has its own GPU alone")
    parser.add_argument("--nccl", action="store_true", help="measure NCCL, too")
    parser.add_argument("--programs", type=int, default=NUM_PROGRAMS, help="of a launch")
    parser.add_argument("--soak", type=int, default=0, metavar="REPLAYS", help="of graphs of 100 sums on two streams")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    args = parser.parse_args()
    results = Results("ranks", args.out)
    if args.gpus:
        over_links(args.gpus, args.sizes, args.programs, args.masked, args.nccl, results)
    if args.soak:
        start = time.perf_counter()
        soak(args.gpus, args.soak)
        us = (time.perf_counter() - start) / args.soak / 100 * 1e6
        results.add(kernel="all-reduces that were checked", cell=100 * args.soak, us=us)


if __name__ == "__main__":
    main()
