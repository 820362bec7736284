"""The store: fresh runners have the weights of the last update, and a damaged store is ignored."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.base.weight_parts import ArraysPart
from runtime.base.weight_version import WeightVersion
from runtime.updates.slice_files import read_slices
from runtime.updates.slices import Slice, SliceSet
from runtime.updates.store import WeightStore
from tests.support.models.runner_driver import open_runner
from tests.support.models.weight_updates import changed, logits, tensors_in, update, write_changed, write_tiny

LIMITS = {"deterministic": True, "max_model_len": 64, "kernel_backend": "torch"}


def start(folder: Path, **config):
    store = str(folder.parent / "store")
    return open_runner(folder, weight_updates=True, **LIMITS | {"weight_store": store} | config)


def layer_of(**values: float) -> SliceSet:
    of = {name: [Slice(None, torch.full((300,), value))] for name, value in values.items()}
    return SliceSet(of, seen=set(of))


def numbers_of(store: WeightStore) -> dict[str, float]:
    """The tensors of the stored version, by its layers."""
    stored = store.read()
    found: dict[str, float] = {}
    for layer in stored.layers if stored else ():
        found |= {name: float(own[0].values[7]) for name, own in layer.slices.of.items()}
    return found


def versions(count: int) -> list[WeightVersion]:
    found = [WeightVersion()]
    for i in range(count):
        found.append(found[-1].after(str(i), None, is_complete=False))
    return found[1:]


def test_a_fresh_runner_has_the_stored_weights(tmp_path):
    folder = write_tiny(tmp_path / "model")
    tensors, runner = tensors_in(folder), start(folder)
    whole = {}
    for i, names in enumerate((list(tensors), list(tensors)[::2], list(tensors)[:3])):
        whole |= changed({name: tensors[name] for name in names}, seed=i)
        update(runner, [ArraysPart({name: whole[name] for name in names})], str(i))
        runner.updates.store()
        fresh = start(folder)
        assert fresh.info == runner.info
        assert fresh.info.weights.serial == i + 1
        assert torch.equal(
            logits(fresh), logits(open_runner(write_changed(folder, whole, tmp_path / str(i)), **LIMITS))
        )
    update(fresh, [ArraysPart(changed({"model.norm.weight": tensors["model.norm.weight"]}, seed=9))], "later")
    assert fresh.info.weights.serial == 4


def test_an_update_that_is_not_kept_is_not_stored(tmp_path):
    folder = write_tiny(tmp_path / "model")
    runner, before = start(folder), logits(start(folder))
    update(runner, [ArraysPart(changed(tensors_in(folder)))])
    assert torch.equal(logits(start(folder)), before)


@pytest.mark.parametrize("damage", ["cut", "zeros", "header", "missing", "state", "other checkpoint"])
def test_a_damaged_store_is_ignored(damage, tmp_path, caplog):
    folder = write_tiny(tmp_path / "model")
    runner, before = start(folder), logits(start(folder))
    update(runner, [ArraysPart(changed(tensors_in(folder)))])
    runner.updates.store()
    (path,) = (tmp_path / "store").glob("*.weights")
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "zeros":
        path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    elif damage == "header":
        path.write_bytes(b"\xff" * 64)
    elif damage == "missing":
        path.unlink()
    elif damage == "state":
        (tmp_path / "store" / "state.json").write_text('{"version"')
    else:
        shutil.rmtree(folder)
        before = logits(open_runner(write_tiny(folder, seed=5), **LIMITS))
    fresh = start(folder)
    assert fresh.info.weights == WeightVersion()
    assert torch.equal(logits(fresh), before)
    update(fresh, [ArraysPart(changed(tensors_in(folder), seed=3))], "another")
    fresh.updates.store()
    assert torch.equal(logits(start(folder)), logits(fresh))


def test_a_folder_that_cannot_be_written_keeps_serving(tmp_path):
    folder = write_tiny(tmp_path / "model")
    (tmp_path / "file").write_text("")
    runner = start(folder, weight_store=str(tmp_path / "file" / "store"))
    tensors = tensors_in(folder)
    first = changed({name: tensors[name] for name in list(tensors)[::2]})
    update(runner, [ArraysPart(first)])
    with pytest.raises(CallboardError, match="weight_store"):
        runner.updates.store()
    second = changed({"model.norm.weight": tensors["model.norm.weight"]}, seed=2)
    update(runner, [ArraysPart(second)], "2")
    whole = write_changed(folder, first | second, tmp_path / "whole")
    assert torch.equal(logits(runner), logits(open_runner(whole, **LIMITS)))


def test_a_version_is_there_when_all_ranks_have_written(tmp_path):
    stores = [WeightStore(tmp_path, "model", Shard(rank, 2)) for rank in range(2)]
    (version,) = versions(1)
    stores[1].write(version, [], layer_of(a=1.0))
    assert [store.read() for store in stores] == [None, None]
    stores[0].write(version, [], layer_of(a=2.0))
    assert [numbers_of(store) for store in stores] == [{"a": 2.0}, {"a": 1.0}]
    assert stores[0].read().version == version
    assert WeightStore(tmp_path, "model", Shard(0, 1)).read() is None
    assert WeightStore(tmp_path, "another", Shard(0, 2)).read() is None


def test_shadowed_files_are_removed(tmp_path):
    store, layers = WeightStore(tmp_path, "model", Shard()), []
    all_versions = versions(4)
    for version, values in zip(all_versions, ({"a": 1, "b": 1}, {"b": 2}, {"b": 3}, {"a": 4, "b": 4}), strict=True):
        layers = store.write(version, layers, layer_of(**values))
        assert len(list(tmp_path.glob("*.weights"))) == len(layers)
    assert len(layers) == 1
    assert numbers_of(store) == {"a": 4.0, "b": 4.0}


def test_two_engines_share_a_store(tmp_path):
    """One is an update behind the other. The newer version stays, and no engine loses tensors."""
    ahead, behind = (WeightStore(tmp_path, "model", Shard()) for _ in range(2))
    first, second, third = versions(3)
    of_ahead = ahead.write(first, [], layer_of(a=1.0, b=1.0))
    of_behind = behind.write(first, [], layer_of(a=1.0, b=1.0))
    of_ahead = ahead.write(second, of_ahead, layer_of(b=2.0))
    of_ahead = ahead.write(third, of_ahead, layer_of(a=3.0, b=3.0))
    of_behind = behind.write(second, of_behind, layer_of(b=2.0))
    assert ahead.read().version == third
    of_behind = behind.write(third, of_behind, layer_of(a=3.0, b=3.0))
    assert numbers_of(behind) == {"a": 3.0, "b": 3.0}
    assert [len(of_ahead), len(of_behind)] == [1, 1]


def test_a_removed_older_file_is_written_again(tmp_path):
    store = WeightStore(tmp_path, "model", Shard())
    first, second = versions(2)
    layers = store.write(first, [], layer_of(a=1.0, b=1.0))
    for path in tmp_path.glob("*.weights"):
        path.unlink()
    store.write(second, layers, layer_of(b=2.0))
    assert numbers_of(store) == {"a": 1.0, "b": 2.0}


def test_files_that_a_dead_process_left_are_removed(tmp_path):
    store, (version,) = WeightStore(tmp_path, "model", Shard()), versions(1)
    left = tmp_path / "00000001-ab-0of1.weights.00ff.unfinished"
    left.write_bytes(b"x" * 100)
    store.write(version, [], layer_of(a=1.0))
    assert not left.exists()


def test_a_file_is_read_as_other_libraries_read_it(tmp_path):
    from safetensors.torch import load_file

    store, (version,) = WeightStore(tmp_path, "model", Shard()), versions(1)
    store.write(version, [], layer_of(a=1.0, b=2.0))
    (path,) = tmp_path.glob("*.weights")
    assert {name: float(tensor[0]) for name, tensor in load_file(path).items()} == {"a": 1.0, "b": 2.0}
    assert json.loads(read_slices(path).metadata["version"])["serial"] == 1


def test_slices_that_others_replace_are_released(tmp_path, monkeypatch):
    """Otherwise later updates would count them as memory in use."""
    folder = write_tiny(tmp_path / "model")
    runner = start(folder)
    names = list(tensors_in(folder))[:2]
    given = {name: tensors_in(folder)[name] for name in names}
    released, release = [], runner.updates._memory.release
    monkeypatch.setattr(runner.updates._memory, "release", lambda slices: (released.extend(slices.of), release(slices)))
    runner.updates.receive(ArraysPart(given))
    assert released == []
    runner.updates.receive(ArraysPart({names[1]: given[names[1]] + 1}))
    assert released == [names[1]]
    runner.update_weights(runner.updates.version.after("1", None, False))
    released.clear()
    update(runner, [ArraysPart({names[0]: given[names[0]] + 1})], "2")  # before the first version is stored
    assert released == [names[0]]
    runner.updates.store()
    assert sorted(released[1:]) == sorted(names)
