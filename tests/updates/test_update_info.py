"""Bodies of weight updates over HTTP: each faulty field is named, and nothing in them can run code."""

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.base.types import CallboardError
from runtime.base.weight_parts import BroadcastPart, FilesPart, GroupInfo, IpcPart, TensorInfo
from runtime.updates.transports.ipc_handles import IpcHandle, checked
from runtime.updates.update_info import group_of_init_info, has_group, part_of_json, parts_of_json

UUID = "5c8ef6a1-0db8-4f9c-93a2-0c5f3cfd1a10"
NAMES = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
TENSORS = [TensorInfo("a", "bfloat16", (2, 3)), TensorInfo("b", "float32", ())]
STORE = {"master_address": "10.0.0.1", "master_port": 4000, "rank_offset": 1, "world_size": 5}


def handle(size: tuple[int, ...] = (2, 3), dtype: str = "bfloat16", **changed: Any) -> list[Any]:
    """The values that a trainer exports for a contiguous tensor of its own storage."""
    steps = [1] * len(size)
    for i in range(len(size) - 1, 0, -1):
        steps[i - 1] = steps[i] * size[i]
    fields = {
        "tensor_size": list(size), "tensor_stride": steps, "tensor_offset": 0, "dtype": dtype, "storage_device": 3,
        "storage_handle": b"\x02c" + bytes(64), "storage_size_bytes": 1 << 20, "storage_offset_bytes": 512,
        "requires_grad": True, "ref_counter_handle": b"/torch_17_4242_0", "ref_counter_offset": 9,
        "event_handle": bytes(64), "event_sync_required": True,
    }  # fmt: skip
    return list((fields | changed).values())


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda data: base64.b64encode(data).decode()))


def ipc_info(**changed: Any) -> dict[str, Any]:
    handles = [{UUID: handle()}, {f"GPU-{UUID.upper()}": handle((), "float32")}]
    return as_json(NAMES | {"ipc_handles": handles} | changed)


def test_a_broadcast_has_names_types_and_shapes():
    assert part_of_json(NAMES) == BroadcastPart(TENSORS)
    assert part_of_json(NAMES | {"ipc_handles": None, "tensor_sizes": None}, "update_info") == BroadcastPart(TENSORS)


def test_a_list_is_several_parts():
    parts = parts_of_json([NAMES, {"paths": ["/dev/shm/step-3"]}])
    assert parts == [BroadcastPart(TENSORS), FilesPart(["/dev/shm/step-3"])]


def test_handles_keep_every_value():
    part = part_of_json(ipc_info())
    assert part == IpcPart(TENSORS, [{UUID: handle()}, {UUID: handle((), "float32")}])


def test_one_object_of_handles_is_a_packed_buffer():
    info = ipc_info(ipc_handles={UUID: handle((16,), "uint8")}, tensor_sizes=[12, 4])
    assert part_of_json(info) == IpcPart(TENSORS, [{UUID: handle((16,), "uint8")}], packed=True)


def test_parts_survive_messages():
    part = part_of_json(ipc_info())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=IpcPart) == part


@pytest.mark.parametrize(
    ("info", "field"),
    [
        ("x", "update_info is 'x'"),
        ([], "update_info has 0 parts"),
        ([NAMES, 3], "update_info[1] is 3"),
        ({}, "update_info.names is missing"),
        (NAMES | {"names": "ab"}, "update_info.names is 'ab'"),
        (NAMES | {"names": []}, "update_info.names has 0 entries"),
        (NAMES | {"names": ["a", ""]}, "update_info.names[1] is ''"),
        (NAMES | {"names": ["a", "a"]}, "update_info.names[1] repeats 'a'"),
        (NAMES | {"names": ["a", "b\n"]}, "update_info.names[1] is 'b\\n'"),
        (NAMES | {"dtype_names": ["bfloat16"]}, "update_info.dtype_names has 1 entries for 2 names"),
        (NAMES | {"dtype_names": ["bfloat16", "load"]}, "update_info.dtype_names[1] is 'load'"),
        (NAMES | {"shapes": [[2], [True]]}, "update_info.shapes[1][0] is True"),
        (NAMES | {"shapes": [[2], [-1]]}, "update_info.shapes[1][0] is -1"),
        (NAMES | {"shapes": [[2], [1] * 9]}, "update_info.shapes[1] is [1, 1"),
        (NAMES | {"shapes": [[1 << 30, 1 << 30], []]}, "update_info.shapes[0] makes"),
        (NAMES | {"packed": True}, "update_info.packed is True; send packed in init_info"),
        (NAMES | {"weights": 1}, "update_info has the unknown field 'weights'"),
        ({"paths": []}, "update_info.paths is []"),
        ({"paths": [3]}, "update_info.paths[0] is 3"),
        ({"paths": ["/x"], "names": []}, "update_info has the unknown field 'names'"),
        ([{"paths": ["/x"]}, {"paths": 1}], "update_info[1].paths is 1"),
    ],
)
def test_a_faulty_field_is_named(info: Any, field: str):
    with pytest.raises(CallboardError, match=r"^[^\n]+\.$") as caught:
        parts_of_json(info)
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"ipc_handles": [{UUID: handle()}]}, "update_info.ipc_handles has 1 entries for 2 names"),
        ({"ipc_handles": 7}, "update_info.ipc_handles is 7"),
        ({"ipc_handles": [{}, {}]}, "update_info.ipc_handles[0] is {}"),
        ({"ipc_handles": [{"cuda:0": handle()}] * 2}, "update_info.ipc_handles[0] has the key 'cuda:0'"),
        ({"ipc_handles": [{UUID: handle()[:-1]}] * 2}, f"update_info.ipc_handles[0].{UUID} is [[2, 3]"),
        ({"ipc_handles": [{UUID: handle()}] * 2}, f"update_info.ipc_handles[1].{UUID} has bfloat16 [2, 3]"),
        ({"tensor_sizes": [12, 4]}, "update_info.tensor_sizes is for packed tensors"),
        ({"packed": True}, "update_info.packed is True"),
        ({"ipc_handles": {UUID: handle((16,), "uint8")}}, "update_info.tensor_sizes is missing"),
        ({"ipc_handles": {UUID: handle((16,), "uint8")}, "tensor_sizes": [12, 5]}, "update_info.tensor_sizes[1] is 5"),
        ({"ipc_handles": {UUID: handle((15,), "uint8")}, "tensor_sizes": [12, 4]}, f"update_info.ipc_handles.{UUID}"),
        ({"ipc_handles": {UUID: handle((16,), "int8")}, "tensor_sizes": [12, 4]}, f"update_info.ipc_handles.{UUID}"),
    ],
)
def test_faulty_handles_are_named(changed: dict[str, Any], field: str):
    with pytest.raises(CallboardError, match=r"^[^\n]+\.$") as caught:
        part_of_json(ipc_info(**changed))
    assert str(caught.value).startswith(field)


def test_pickled_handles_are_refused_for_json():
    with pytest.raises(CallboardError, match=r"ipc_handles_pickled .* send ipc_handles as JSON"):
        part_of_json(NAMES | {"ipc_handles_pickled": "gASVAAAA"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_size", "23"),
        ("tensor_stride", [3]),
        ("tensor_stride", [-3, 1]),
        ("tensor_offset", 1.0),
        ("dtype", "Tensor"),
        ("storage_device", -1),
        ("storage_handle", b"short"),
        ("storage_handle", None),
        ("storage_size_bytes", 11),
        ("storage_offset_bytes", -512),
        ("ref_counter_handle", b"/other_file"),
        ("ref_counter_handle", b"/torch_1_2/../../x"),
        ("ref_counter_offset", 10_000),
        ("ref_counter_offset", -1),
        ("event_handle", bytes(63)),
        ("event_handle", b""),
        ("event_sync_required", 1),
    ],
)
def test_a_faulty_value_of_a_handle_is_named(field: str, value: Any):
    with pytest.raises(CallboardError, match=rf"^here\.{field}(\[\d\])? is .*\.$"):
        checked(handle(**{field: value}), "here")


@given(st.data())
def test_a_handle_is_accepted_iff_its_tensor_fits(data: st.DataObject):
    """The definition, by the offset of each element."""
    size = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    steps = data.draw(st.lists(st.integers(0, 7), min_size=len(size), max_size=len(size)))
    offset, storage = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 120))
    places = [offset]
    for count, step in zip(size, steps, strict=True):
        places = [place + i * step for place in places for i in range(count)]
    end = max((place + 1 for place in places), default=0) * 2
    values = handle(size, tensor_stride=steps, tensor_offset=offset, storage_size_bytes=storage)
    if end <= storage:
        assert checked(values, "here").end_bytes == end
    else:
        with pytest.raises(CallboardError, match="storage_size_bytes"):
            checked(values, "here")


def test_an_empty_storage_needs_no_handles():
    empty = handle((0, 3), storage_handle=None, storage_size_bytes=0, ref_counter_handle=None, event_handle=None,
                   event_sync_required=None)  # fmt: skip
    assert isinstance(checked(empty, "here"), IpcHandle)


def test_a_group_of_a_store():
    group = group_of_init_info(STORE | {"packed": True, "nccl_unique_id_b64": None}, 3)
    assert group == GroupInfo(4, 5, "10.0.0.1", 4000, b"", True, 1 << 30, 2)
    sized = STORE | {"packed_buffer_size_bytes": 77, "packed_num_buffers": 3}
    assert group_of_init_info(sized, 0) == GroupInfo(1, 5, "10.0.0.1", 4000, b"", False, 77, 3)


def test_a_group_of_a_unique_id():
    encoded = base64.b64encode(bytes(range(128))).decode()
    group = group_of_init_info({"rank_offset": 2, "world_size": 4, "nccl_unique_id_b64": encoded}, 1)
    assert group == GroupInfo(3, 4, unique_id=bytes(range(128)))


def test_ipc_needs_no_group():
    assert not has_group({"packed": True})
    assert not has_group({})
    assert has_group(STORE)


@pytest.mark.parametrize(
    ("info", "field"),
    [
        (None, "init_info is None"),
        ({"rank_offset": 1, "world_size": 5}, "init_info.master_address and init_info.master_port are needed"),
        (STORE | {"master_port": 65536}, "init_info.master_port is 65536"),
        (STORE | {"master_address": ""}, "init_info.master_address is ''"),
        (STORE | {"world_size": 4}, "init_info.world_size is 4, but a runner has rank 4"),
        (STORE | {"rank_offset": 0}, "init_info.rank_offset is 0"),
        (STORE | {"packed": 1}, "init_info.packed is 1"),
        (STORE | {"packed_num_buffers": 0}, "init_info.packed_num_buffers is 0"),
        (STORE | {"packed_buffer_size_bytes": 1 << 40}, "init_info.packed_buffer_size_bytes is"),
        (STORE | {"backend": "nccl"}, "init_info has the unknown field 'backend'"),
        (STORE | {"nccl_unique_id_b64": "AAAA"}, "init_info.nccl_unique_id_b64 replaces master_address"),
        ({"rank_offset": 1, "world_size": 5, "nccl_unique_id_b64": "AA-_"}, "init_info.nccl_unique_id_b64 does not"),
    ],
)
def test_a_faulty_group_is_named(info: Any, field: str):
    with pytest.raises(CallboardError, match=r"^[^\n]+\.$") as caught:
        group_of_init_info(info, 3)
    assert str(caught.value).startswith(field)
