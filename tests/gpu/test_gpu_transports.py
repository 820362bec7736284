"""Weights from the processes of trainers, in the memory of one GPU, and over NCCL between two."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.base.types import CallboardError
from runtime.base.weight_parts import BroadcastPart, GroupInfo, IpcPart
from runtime.updates.transports import nccl
from runtime.updates.transports.ipc import IpcReceiver
from runtime.updates.transports.nccl import NcclReceiver
from runtime.updates.transports.nccl_library import NcclGroup, library
from runtime.updates.transports.packing import flat_bytes
from runtime.updates.update_info import group_of_init_info, part_of_json
from tests.support.updates import gpu_trainers
from tests.support.updates.gpu_trainers import weights
from tests.support.updates.trainers import answer_of, trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank; here is one")
GPU = torch.device("cuda", 0)


def ipc_part(text: str) -> IpcPart:
    part = part_of_json(json.loads(text))
    assert isinstance(part, IpcPart)
    return part


def copied(receiver: IpcReceiver | NcclReceiver, part: Any) -> dict[str, torch.Tensor]:
    """Copies on a stream of their own, as a runner makes them beside steps."""
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        found = {name: tensor.clone() for name, tensor in receiver.tensors(part)}
        torch.cuda.current_stream().synchronize()
    return found


def check(got: dict[str, torch.Tensor], seed: int) -> None:
    want = weights(seed)
    assert [*got] == [*want]
    for name, tensor in got.items():
        assert tensor.device == GPU
        assert (tensor.dtype, tensor.shape) == (want[name].dtype, want[name].shape), name
        assert torch.equal(flat_bytes(tensor).cpu(), flat_bytes(want[name])), name


def check_gpu_works() -> None:
    ones = torch.ones(1000, 1000, device=GPU)
    assert (ones @ ones).sum().item() == 1e9


@pytest.mark.parametrize("packed", [False, True])
def test_updates_from_the_memory_of_a_trainer(packed: bool):
    receiver = IpcReceiver(GPU)
    with trainer(gpu_trainers.export, packed, 3) as (_, connection):
        for seed in range(3):
            check(copied(receiver, ipc_part(answer_of(connection))), seed)
            receiver.release()
            connection.send("reply")
        assert answer_of(connection) == 0  # the trainer's allocator has all memory back


def test_parts_in_one_buffer_have_one_mapping():
    receiver, got = IpcReceiver(GPU), dict[str, torch.Tensor]()
    with trainer(gpu_trainers.export_pieces, 4 << 20) as (_, connection):
        num_parts = 0
        while (text := answer_of(connection)) is not None:
            got |= copied(receiver, ipc_part(text))
            num_parts += 1
            connection.send("reply")
        assert num_parts > 1
        check(got, 1)
        receiver.release()
        connection.send("end")
        assert answer_of(connection) == 0


def test_handles_of_another_gpu_are_refused():
    with trainer(gpu_trainers.export, False, 1) as (_, connection):
        part = ipc_part(answer_of(connection))
        other = "00000000-0000-0000-0000-000000000000"
        moved = [dict.fromkeys([other], next(iter(by_uuid.values()))) for by_uuid in part.handles]
        with pytest.raises(CallboardError, match=rf"ipc_handles\[0\] is for the GPUs {other}, but this runner has"):
            copied(IpcReceiver(GPU), IpcPart(part.tensors, moved))


def test_a_storage_behind_the_memory_is_refused():
    with trainer(gpu_trainers.export, False, 1) as (_, connection):
        part = ipc_part(answer_of(connection))
        for by_uuid in part.handles:
            for values in by_uuid.values():
                values[6] = 1 << 40 if values[5] is not None else 0  # storage_size_bytes, storage_handle
        with pytest.raises(CallboardError, match=r"storage_size_bytes 1099511627776, but its memory has"):
            copied(IpcReceiver(GPU), part)
    check_gpu_works()


@pytest.mark.parametrize("packed", [False, True])
def test_a_trainer_that_died_before_the_copy(packed: bool):
    with trainer(gpu_trainers.export, packed, 1) as (process, connection):
        part = ipc_part(answer_of(connection))
        process.kill()
        process.join()
        with pytest.raises(CallboardError, match=r"memory of .* cannot be mapped"):
            copied(IpcReceiver(GPU), part)
    check_gpu_works()


@pytest.mark.parametrize("packed", [False, True])
def test_a_trainer_that_dies_after_the_copy(packed: bool):
    receiver = IpcReceiver(GPU)
    with trainer(gpu_trainers.export, packed, 1) as (process, connection):
        got = copied(receiver, ipc_part(answer_of(connection)))
        process.kill()
        process.join()
        check(got, 0)
        receiver.release()
    check_gpu_works()
    with trainer(gpu_trainers.export, packed, 1) as (_, connection):  # the next trainer
        check(copied(receiver, ipc_part(answer_of(connection))), 0)


def test_a_group_of_one_rank():
    """All functions of NCCL, on one GPU."""
    group = NcclGroup(GPU)
    group.begin(library().unique_id(), 0, 1)
    until(group.is_ready)
    group.warm_up()
    until(group.is_ready)
    until(group.arrival())
    memory = group.joined([torch.arange(10, device=GPU), torch.ones(3, device=GPU)])
    group.broadcast(memory)
    until(group.is_ready)
    until(group.arrival())
    group.follow()
    assert memory.cpu()[:80].view(torch.int64).tolist() == [*range(10)]
    assert group.buffer(5).shape == (5,)
    group.abort()
    with pytest.raises(CallboardError, match="was disconnected"):
        group.is_ready()
    check_gpu_works()


def test_without_the_trainers_rank_join_ends_in_time():
    lonely = GroupInfo(1, 2, unique_id=library().unique_id())
    with pytest.raises(CallboardError, match=r"Not all 2 ranks .* joined within 3 s"):
        NcclReceiver(GPU, join_timeout_s=3.0).join(lonely)
    check_gpu_works()


def test_leave_ends_a_join_of_nccl():
    receiver = NcclReceiver(GPU)
    sentence = failing(lambda: receiver.join(GroupInfo(1, 2, unique_id=library().unique_id())), receiver.leave)
    assert sentence == "The trainer was disconnected, and its transfer ended; connect it again."
    check_gpu_works()


def test_a_trainer_on_the_same_gpu_is_refused():
    with trainer(gpu_trainers.broadcast, [], None, {}, 0) as (_, connection):
        group = group_of_init_info(json.loads(answer_of(connection)), 0)
        with pytest.raises(CallboardError, match="and another GPU than the trainer's"):
            NcclReceiver(GPU).join(group)
    check_gpu_works()


@two_gpus
@pytest.mark.parametrize("options", [{"buffer_bytes": 1 << 20}, {"buffer_bytes": 1}, {}, {"packed": False}])
def test_updates_that_a_trainer_broadcasts(options: dict[str, Any]):
    receiver = NcclReceiver(GPU)
    with trainer(gpu_trainers.broadcast, [0, 1, 2], None, options) as (_, connection):
        part = joined(receiver, connection)
        for seed in range(3):
            connection.send("go")
            check(copied(receiver, part), seed)
        assert answer_of(connection) == "sent"
        receiver.leave()
    check_gpu_works()


@two_gpus
def test_a_trainer_that_dies_within_a_broadcast(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl, "_GRACE_S", 1.0)
    receiver = NcclReceiver(GPU)
    with trainer(gpu_trainers.broadcast, [0], 3, {"packed": False}) as (process, connection):
        part = joined(receiver, connection)
        connection.send("go")

        def die() -> None:
            assert answer_of(connection) == "sent"  # three tensors
            process.kill()

        sentence = failing(lambda: copied(receiver, part), die)
    assert sentence.endswith("ended before its weights had arrived; start it again and connect it.")
    check_gpu_works()
    with trainer(gpu_trainers.broadcast, [1], None, {}) as (_, connection):  # the next trainer
        part = joined(receiver, connection)
        connection.send("go")
        check(copied(receiver, part), 1)


@two_gpus
def test_leave_ends_a_broadcast_that_waits():
    receiver = NcclReceiver(GPU)
    with trainer(gpu_trainers.broadcast, [0], None, {}) as (_, connection):
        part = joined(receiver, connection)
        sentence = failing(lambda: copied(receiver, part), receiver.leave)
    assert sentence == "The trainer was disconnected, and its transfer ended; connect it again."
    check_gpu_works()


@two_gpus
def test_steps_go_on_while_a_broadcast_waits():
    """A kernel of NCCL waits for the trainer, and work on other streams passes it."""
    receiver = NcclReceiver(GPU)
    check_gpu_works()  # the driver loads a kernel at its first use, and the load waits for running kernels
    with trainer(gpu_trainers.broadcast, [0], None, {}) as (_, connection):
        part, got = joined(receiver, connection), dict[str, torch.Tensor]()
        thread = threading.Thread(target=lambda: got.update(copied(receiver, part)))
        thread.start()
        time.sleep(0.5)
        check_gpu_works()
        assert thread.is_alive()
        connection.send("go")
        thread.join(60)
        check(got, 0)


def joined(receiver: NcclReceiver, connection: Any) -> BroadcastPart:
    """Join the group of a trainer; return the part that it will send."""
    receiver.join(group_of_init_info(json.loads(answer_of(connection)), 0))
    part = part_of_json(json.loads(answer_of(connection)))
    assert isinstance(part, BroadcastPart)
    return part


def until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def failing(work: Callable[[], object], end: Callable[[], object]) -> str:
    """The sentence of a CallboardError that `work` raises in a thread, after `end` was called beside it."""
    sentences: list[str] = []

    def run() -> None:
        try:
            work()
        except CallboardError as e:
            sentences.append(str(e))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(1)  # `work` waits by then, or fails in the same way
    end()
    thread.join(60)
    assert not thread.is_alive()
    return sentences[0]
