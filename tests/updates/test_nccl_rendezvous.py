"""The rendezvous with a trainer's NCCL group, and its transfers, over torch's real store and a group of sockets."""

import contextlib
import ctypes
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.base.types import CallboardError
from runtime.base.weight_parts import BroadcastPart, GroupInfo, TensorInfo
from runtime.updates import sending
from runtime.updates.tensor_infos import num_bytes
from runtime.updates.transports import nccl, rendezvous
from runtime.updates.transports.nccl import NcclReceiver
from runtime.updates.transports.packing import cut, flat_bytes, info_of, unpacked
from runtime.updates.transports.unique_id import pickled_unique_id, unique_id_of
from runtime.updates.update_info import broadcast_part_of_json, group_of_init_info
from tests.support.updates import trainers
from tests.support.updates.socket_group import SocketGroup

MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
ID = bytes(range(128))
WEIGHTS = {
    "embed": torch.arange(600, dtype=torch.bfloat16).view(60, 10),
    "odd": torch.arange(7, dtype=torch.uint8),  # the next tensor is at an odd place in its buffer
    "norm": torch.arange(10, dtype=torch.float32) / 7,
    "scale": torch.tensor(0.25, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "fp8": torch.arange(48).to(torch.float8_e4m3fn).view(6, 8),
    "columns": torch.arange(12.0).view(3, 4).T,  # not contiguous
}


class ncclUniqueId(ctypes.Structure):
    """As vLLM declares it."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


@pytest.fixture
def vllm_id(monkeypatch: pytest.MonkeyPatch) -> type[ncclUniqueId]:
    """The class under its name in vLLM, which pickles have."""
    names = MODULE.split(".")
    for i in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:i]), ModuleType(".".join(names[:i])))
    monkeypatch.setattr(sys.modules[MODULE], "ncclUniqueId", ncclUniqueId, raising=False)
    monkeypatch.setattr(ncclUniqueId, "__module__", MODULE)
    return ncclUniqueId


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_an_id_that_vllm_pickled_is_read(vllm_id: type[ncclUniqueId], protocol: int):
    assert unique_id_of(pickle.dumps(vllm_id.from_buffer_copy(ID), protocol)) == ID


def test_vllm_loads_an_id_of_ours(vllm_id: type[ncclUniqueId]):
    loaded = pickle.loads(pickled_unique_id(ID))
    assert type(loaded) is vllm_id
    assert bytes(loaded) == ID
    assert unique_id_of(pickled_unique_id(ID)) == ID


class Evil:
    """An object that makes a folder where it is loaded."""

    def __init__(self, path: Path, last: bytes = b"") -> None:
        self.path, self.last = path, last

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_an_id_does_not_run(tmp_path: Path):
    path = tmp_path / "made"
    inside = pickle.dumps((Evil(path), ID))
    behind = pickled_unique_id(ID)[:-1] + pickle.dumps(Evil(path))[2:]
    for pickled in (pickle.dumps(Evil(path)), inside, behind):
        with pytest.raises(CallboardError, match="not an ncclUniqueId"):
            unique_id_of(pickled)
    assert not path.exists()
    pickle.loads(inside)
    assert path.exists()  # the test would notice


@pytest.mark.parametrize("pickled", [b"", ID, pickle.dumps(ID), pickle.dumps(None), b"\x80\x04", b"x" * 10_000])
def test_other_bytes_are_no_id(pickled: bytes):
    with pytest.raises(CallboardError, match="not an ncclUniqueId"):
        unique_id_of(pickled)


@given(st.integers(0, 250), st.binary(max_size=4))
def test_a_changed_pickle_is_refused_or_has_128_bytes(place: int, changed: bytes):
    good = pickled_unique_id(ID)
    with contextlib.suppress(CallboardError):
        assert len(unique_id_of(good[:place] + changed + good[place + len(changed) :])) == 128


def cut_as_the_producer_does(sizes: list[int], buffer_bytes: int) -> list[list[int]]:
    """vLLM's producer: fill a buffer until it exceeds its size, then send it; send the rest at the end."""
    buffers, waiting = [], list(sizes)
    while waiting:
        buffer: list[int] = []
        while waiting:
            buffer.append(waiting.pop(0))
            if sum(buffer) > buffer_bytes:
                break
        buffers.append(buffer)
    return buffers


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60))
@example([10, 10, 1], 20)  # a full buffer is still open
def test_buffers_are_cut_as_the_producer_does(sizes: list[int], buffer_bytes: int):
    assert list(cut(sizes, lambda size: size, buffer_bytes)) == cut_as_the_producer_does(sizes, buffer_bytes)
    assert list(cut(sizes, lambda size: size, None)) == [[size] for size in sizes]


@given(st.lists(st.sampled_from([*WEIGHTS])))
def test_unpacking_undoes_packing(names: list[str]):
    infos = [info_of(name, WEIGHTS[name]) for name in names]
    buffer = torch.cat([torch.empty(0, dtype=torch.uint8), *(flat_bytes(WEIGHTS[name]) for name in names)])
    assert buffer.numel() == sum(map(num_bytes, infos))
    got = list(unpacked(buffer, infos))
    assert [name for name, _ in got] == names
    for name, tensor in got:
        equal(tensor, WEIGHTS[name])


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(flat_bytes(got), flat_bytes(want))


def receiver(**options: Any) -> NcclReceiver:
    return NcclReceiver(torch.device("cpu"), SocketGroup, **{"join_timeout_s": 100.0} | options)


def received(one: NcclReceiver, part: BroadcastPart) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.tensors(part)}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("buffer_bytes", [64, 1 << 20])
def test_ranks_receive_what_a_trainer_sends(packed: bool, buffer_bytes: int):
    part = broadcast_part_of_json(sending.nccl_update_info(WEIGHTS.items()))
    more = {name: tensor.flip(0) if tensor.dim() else tensor for name, tensor in WEIGHTS.items()}
    options = {"packed": packed, "buffer_bytes": buffer_bytes, "num_buffers": 3}
    with trainers.trainer(trainers.send_with, 3, [WEIGHTS, more], options) as (_, connection):
        init_info, ranks = trainers.answer_of(connection), [receiver(), receiver()]
        join = threading.Thread(target=ranks[1].join, args=(group_of_init_info(init_info, 1),))
        join.start()
        ranks[0].join(group_of_init_info(init_info, 0))
        join.join()
        for weights in (WEIGHTS, more):
            connection.send("go")
            for rank in ranks:
                got = received(rank, part)
                assert [*got] == [*weights]
                for name, tensor in got.items():
                    equal(tensor, weights[name])
        assert trainers.answer_of(connection) == "sent"


def test_the_next_buffers_arrive_while_one_is_read():
    groups: list[SocketGroup] = []

    def make(device: torch.device) -> SocketGroup:
        groups.append(SocketGroup(device))
        return groups[-1]

    one = NcclReceiver(torch.device("cpu"), make)
    part = BroadcastPart([info_of(name, WEIGHTS[name]) for name in WEIGHTS])
    with trainers.trainer(trainers.send_with, 2, [WEIGHTS], {"packed": False}) as (_, connection):
        one.join(group_of_init_info(trainers.answer_of(connection), 0))
        tensors = one.tensors(part)
        connection.send("go")
        next(tensors)
        assert groups[0].num_follows == 0  # a read of the first tensor may still come
        next(tensors)
        assert groups[0].num_follows == 1
        list(tensors)
        assert groups[0].most_waiting <= 2


def test_without_a_trainer_join_ends_at_its_time_limit():
    port = rendezvous.listening_socket("127.0.0.1", 0).getsockname()[1]  # closed at once
    with pytest.raises(CallboardError, match="cannot be reached"):
        receiver(join_timeout_s=1.0).join(GroupInfo(1, 2, "127.0.0.1", port))


def test_without_an_id_join_ends_at_its_time_limit():
    with trainers.trainer(trainers.publish_bytes, b"") as (_, connection):
        port = trainers.answer_of(connection)
        with pytest.raises(CallboardError, match=r"wrote no id of its NCCL group within 1\.0 s"):
            receiver(join_timeout_s=1.0).join(GroupInfo(1, 2, "127.0.0.1", port))


def test_join_refuses_a_pickle_of_something_else():
    with trainers.trainer(trainers.publish_bytes, pickle.dumps({"internal": ID})) as (_, connection):
        port = trainers.answer_of(connection)
        with pytest.raises(CallboardError, match="not an ncclUniqueId"):
            receiver().join(GroupInfo(1, 2, "127.0.0.1", port))


def test_leave_ends_a_join():
    one = receiver()
    with trainers.trainer(trainers.publish_bytes, b"") as (_, connection):
        port = trainers.answer_of(connection)
        sentence = failing(lambda: one.join(GroupInfo(1, 2, "127.0.0.1", port)), one.leave)
    assert sentence == "The trainer was disconnected, and its transfer ended; connect it again."


def test_leave_ends_a_receive_that_waits():
    one = receiver()
    with trainers.trainer(trainers.connect_and_wait) as (_, connection):
        one.join(group_of_init_info(trainers.answer_of(connection), 0))
        part = BroadcastPart([TensorInfo("a", "float32", (3,))])
        sentence = failing(lambda: list(one.tensors(part)), one.leave)
        assert sentence == "The trainer was disconnected, and its transfer ended; connect it again."
        with pytest.raises(CallboardError, match="No trainer is connected"):
            next(one.tensors(part))


def test_a_killed_trainer_ends_a_receive(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl, "_GRACE_S", 0.2)
    one = receiver()
    with trainers.trainer(trainers.connect_and_wait) as (process, connection):
        one.join(group_of_init_info(trainers.answer_of(connection), 0))
        part = BroadcastPart([TensorInfo("a", "float32", (3,))])
        sentence = failing(lambda: list(one.tensors(part)), process.kill)
    assert sentence.startswith("The trainer at 127.0.0.1:")
    assert sentence.endswith("ended before its weights had arrived; start it again and connect it.")


def test_a_transfer_that_is_not_read_leaves_the_group():
    one, part = receiver(), BroadcastPart([info_of(name, WEIGHTS[name]) for name in WEIGHTS])
    with trainers.trainer(trainers.send_with, 2, [WEIGHTS], {"packed": False}) as (_, connection):
        one.join(group_of_init_info(trainers.answer_of(connection), 0))
        connection.send("go")
        tensors = one.tensors(part)
        next(tensors)
        tensors.close()
    with pytest.raises(CallboardError, match="No trainer is connected"):
        next(one.tensors(part))
    with trainers.trainer(trainers.send_with, 2, [WEIGHTS], {}) as (_, connection):  # the next trainer can connect
        one.join(group_of_init_info(trainers.answer_of(connection), 0))
        connection.send("go")
        assert [*received(one, part)] == [*WEIGHTS]


def test_transfers_do_not_overlap():
    one, part = receiver(), BroadcastPart([info_of(name, WEIGHTS[name]) for name in WEIGHTS])
    with trainers.trainer(trainers.send_with, 2, [WEIGHTS], {"packed": False}) as (_, connection):
        one.join(group_of_init_info(trainers.answer_of(connection), 0))
        connection.send("go")
        tensors = one.tensors(part)
        next(tensors)
        with pytest.raises(CallboardError, match="was not read to its end"):
            next(one.tensors(part))
        with pytest.raises(CallboardError, match="was disconnected"):
            list(tensors)


def failing(work: Any, end: Any) -> str:
    """The sentence of a CallboardError that `work` raises in a thread, after `end` was called beside it."""
    sentences: list[str] = []

    def run() -> None:
        try:
            work()
        except CallboardError as e:
            sentences.append(str(e))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)  # `work` waits by then, or fails in the same way
    end()
    thread.join(60)
    assert not thread.is_alive()
    return sentences[0]
