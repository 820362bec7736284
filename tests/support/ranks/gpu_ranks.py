"""The work of ranks on one GPU: in processes, which the device runs in turns, or on two streams of one.

Its import does not use CUDA, because processes are forked after it."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch

from runtime.base.types import CallboardError
from runtime.kernels.collectives import inboxes
from runtime.kernels.collectives.all_reduce import sum_partials_torch
from runtime.worker.ranks.peer_memory import PeerMemory

SHAPES = ((1, 4096), (3, 2880), (1, 130), (64, 4096), (1000, 4096), (9, 128256))


def make(rank: int, size: int, timeout_s: float = 30.0, tree: bool = False) -> PeerMemory:
    return PeerMemory(rank, size, 8 << 20, torch.device("cuda", 0), tree, timeout_s)


def every_operation(ranks: PeerMemory) -> str:
    """Bits of the definition, in pieces and in whole."""
    tree = ranks.op == "tree"
    for i, shape in enumerate(SHAPES):
        dtype = torch.float32 if tree or i % 3 == 1 else torch.bfloat16
        generator = torch.Generator("cuda").manual_seed(i)
        drawn = torch.randn(ranks.size, *shape, device="cuda", generator=generator).to(dtype)
        drawn[:, 0, 3] = -0.0
        drawn[0, 0, 5], drawn[-1, 0, 6] = torch.nan, torch.inf
        partials, own = list(drawn), drawn[ranks.rank].clone()
        wide = sum_partials_torch(partials, tree)
        equal(ranks.reduced(own), wide.to(dtype))
        residual = torch.randn(shape, device="cuda", generator=generator).bfloat16()
        want, row = (residual.float() + wide).bfloat16(), residual[-1:].clone()
        ranks.add_reduced(residual, own)
        equal(residual, want)
        ranks.add_reduced(row, own[-1:])
        equal(row, want[-1:])  # whichever way its batch went
        equal(ranks.all_gather(own), torch.cat(partials, -1))
    keys = torch.arange(300, device="cuda") * (1 << 40) * (-1) ** ranks.rank + ranks.rank
    want = torch.maximum(torch.arange(300) * (1 << 40), 1 - torch.arange(300) * (1 << 40))
    if ranks.size == 2:
        equal(ranks.all_max(keys), want.cuda())
    torch.cuda.synchronize()
    ranks.check()
    return "equal"


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


class Replays:
    """A graph of sums of small integers. Each sum has another operand, and the total is exact, so a stale or duplicated
    slot shows in it. Sums of several lengths follow each other."""

    def __init__(self, ranks: PeerMemory, num_sums: int) -> None:
        self.ranks, self.num_replays = ranks, 0
        generator = torch.Generator().manual_seed(5)
        shapes = [random.Random(i).choice(((1, 4096), (3, 4096), (1, 576), (30, 4096))) for i in range(num_sums)]
        operands = [torch.randint(-4, 5, (ranks.size, *shape), generator=generator).float() for shape in shapes]
        self.totals = {shape: torch.zeros(shape, device="cuda") for shape in set(shapes)}
        self.want = {shape: torch.zeros(shape) for shape in set(shapes)}
        for shape, operand in zip(shapes, operands, strict=True):
            self.want[shape] += operand.sum(0)
        self.own = [operand[ranks.rank].bfloat16().cuda() for operand in operands]
        self.keys, self.sum_of_keys = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.zeros(8).long().cuda()
        self.start_keys = (torch.arange(8) * (-1) ** ranks.rank).cuda()
        # Torch loads a kernel when it is first used, and the load waits for running kernels: another rank's, perhaps.
        self.sum_of_keys.add_(self.keys)
        torch.cuda._sleep(1)
        self.graph = torch.cuda.CUDAGraph()

    def run(self) -> None:
        for own in self.own:
            self.ranks.add_reduced(self.totals[tuple(own.shape)], own)
        self.keys.copy_(self.start_keys)
        self.ranks.all_max(self.keys)
        self.sum_of_keys.add_(self.keys)

    def capture(self) -> None:
        """Capture after a run of all ranks, so that every kernel is loaded."""
        self.num_replays = 1
        with torch.cuda.graph(self.graph):
            self.run()

    def replay(self, sleep_cycles: int) -> None:
        if sleep_cycles:
            torch.cuda._sleep(sleep_cycles)
        self.graph.replay()
        self.num_replays += 1

    def check(self) -> None:
        torch.cuda.synchronize()
        self.ranks.check()
        for shape, total in self.totals.items():
            assert torch.equal(total.cpu(), self.want[shape] * self.num_replays)
        assert self.sum_of_keys.tolist() == [i * self.num_replays for i in range(8)]


def make_apart(rank: int, size: int) -> PeerMemory:
    """A process's rank on a GPU that no other rank sees."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    return make(rank, size)


def replay_in_processes(ranks: PeerMemory, num_replays: int = 100, num_sums: int = 10) -> str:
    replays, delays = Replays(ranks, num_sums), random.Random(ranks.rank)
    replays.run()
    torch.cuda.synchronize()
    replays.capture()
    for i in range(num_replays):
        replays.replay(delays.choice((0, 0, 20_000, 500_000)))
        if i % 20 == 19:
            replays.check()
    replays.check()
    return "equal"


@patch.object(inboxes, "use_pdl", lambda tensor: False)
def replay_on_streams(num_replays: int, num_sums: int) -> None:
    """Two ranks of this process. Without programmatic launch. With it, all launches of one rank's graph would wait on
    the device at once. Work between the other rank's sums, such as a copy or a kernel of torch, could not pass them."""
    pair = [make(rank, 2) for rank in range(2)]
    streams = [torch.cuda.Stream() for _ in pair]
    handles = [ranks.handle for ranks in pair]

    def connect(ranks: PeerMemory) -> None:
        with torch.cuda.stream(streams[ranks.rank]):
            ranks.connect(handles)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(connect, pair))
    both, delays = [Replays(ranks, num_sums) for ranks in pair], random.Random(0)
    torch.cuda.synchronize()
    for own, replays in zip(streams, both, strict=True):
        with torch.cuda.stream(own):
            replays.run()
    torch.cuda.synchronize()
    for replays in both:
        replays.capture()
    for i in range(num_replays):
        for own, replays in zip(streams, both, strict=True):
            with torch.cuda.stream(own):
                replays.replay(delays.choice((0, 0, 0, 2_000, 50_000)))
        if i % 200 == 199:
            both[0].check()
    for replays in both:
        replays.check()
    for ranks in pair:
        ranks.close()


def last_rank_dies(ranks: PeerMemory) -> tuple[str, float]:
    """The error of the other ranks, and the seconds until it; a graph is in the middle of its replays."""
    replays = Replays(ranks, 10)
    replays.run()
    torch.cuda.synchronize()
    replays.capture()
    for _ in range(5):
        replays.replay(0)
    replays.check()
    ranks.set_timeout(1.0)
    torch.cuda.synchronize()
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    for _ in range(5):
        replays.replay(0)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    try:
        ranks.check()
    except CallboardError as e:
        return str(e), seconds
    return "no error", seconds
