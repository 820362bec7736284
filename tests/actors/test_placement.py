"""The placement of actors, as plain functions of the cluster's resources."""

from typing import Any

import pytest
from ray.util.placement_group import PlacementGroup

from actors.ray.machines import Machines, machines_of
from actors.ray.placement import (
    RUNNER_CPUS,
    SUPERVISOR_CPUS,
    bundles,
    default_fronts,
    described,
    device_of,
    draft_options,
    engine_options,
    has_room,
    runner_options,
)
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError

GROUP = PlacementGroup.empty()


def machines(*nodes: dict[str, float], can_grow: bool = False) -> Machines:
    return Machines({str(i): node for i, node in enumerate(nodes)}, can_grow)


def uses_gpu(config: EngineConfig, *nodes: dict[str, float], can_grow: bool = False) -> bool:
    return device_of(config, machines(*nodes, can_grow=can_grow)).gpu


@pytest.mark.parametrize(("cpus", "fronts"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (17.5, 4), (128, 4)])
def test_the_number_of_fronts_follows_the_cpus(cpus, fronts):
    assert default_fronts(machines({"CPU": float(cpus)}), [1], [False]) == fronts


def test_a_cluster_without_known_cpus_gets_one_front():
    assert default_fronts(machines(), [1], [False]) == 1


@pytest.mark.parametrize(
    ("engines", "gpus", "fronts"), [([1], [False], 1), ([1], [True], 2), ([2, 1], [False, True], 4), ([9], [True], 4)]
)
def test_fronts_of_a_cluster_follow_its_engines(engines, gpus, fronts):
    for nodes in ([], [{"CPU": 1.0}], [{"CPU": 128.0}] * 3):
        assert default_fronts(machines(*nodes, can_grow=True), engines, gpus) == fronts


@pytest.mark.parametrize(
    ("device", "gpus", "want"), [("auto", 0, False), ("auto", 1, True), ("cpu", 1, False), ("cuda", 1, True)]
)
def test_runners_get_gpus_if_the_cluster_has_any(device, gpus, want):
    config = EngineConfig(device=device)
    for can_grow in (False, True):
        assert uses_gpu(config, {"CPU": 4.0, "GPU": float(gpus)}, can_grow=can_grow) is want
    assert ("GPU" in bundles(config, want)[1]) is want


def test_too_few_gpus_are_reported_where_no_machine_may_join():
    """All ranks are on one machine. A machine with GPUs does not get a large model on its CPU."""
    one_each = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}]
    for device in ("auto", "cuda"):
        config = EngineConfig(device=device, tensor_parallel_size=2)
        with pytest.raises(CallboardError, match=r"size=2 needs 2 GPUs .* have 1 at most; use a smaller .* quantiz"):
            uses_gpu(config, *one_each)
        gpu, why = device_of(config, machines(*one_each, can_grow=True))
        assert gpu
        assert "have 1 at most now, so engines wait; else use a smaller tensor_parallel_size, quantization" in why
        assert uses_gpu(config, *one_each, {"GPU": 4.0})
    assert not uses_gpu(EngineConfig(tensor_parallel_size=2), {"CPU": 8.0})
    assert not uses_gpu(EngineConfig(device="cpu", tensor_parallel_size=2), *one_each)
    with pytest.raises(CallboardError, match=r"needs 1 GPUs .* machines have 0 at most; use device=cpu, or add GPUs"):
        uses_gpu(EngineConfig(device="cuda"), {"CPU": 4.0})


@pytest.mark.parametrize("nodes", [[], [{"CPU": 8.0}], [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}]])
def test_cuda_plans_gpus_where_machines_may_join(nodes):
    assert uses_gpu(EngineConfig(device="cuda", tensor_parallel_size=2), *nodes, can_grow=True)


def test_auto_without_a_gpu_names_the_settings_that_wait():
    gpu, why = device_of(EngineConfig(), machines({"CPU": 8.0}, can_grow=True))
    assert (gpu, why) == (False, "no machine has 1 GPUs now; device=cuda or accelerator_type waits for them")


def test_an_accelerator_type_is_in_each_runners_bundle():
    config, kind = EngineConfig(device="cuda", tensor_parallel_size=2), "accelerator_type:H100"
    nodes = {"CPU": 8.0, "GPU": 8.0, "accelerator_type:A10G": 1.0}, {"CPU": 8.0, "GPU": 1.0, kind: 1.0}
    with pytest.raises(CallboardError, match=r"needs 2 H100 GPUs on one machine, but .* have 1 at most"):
        device_of(config, machines(*nodes), "H100")
    assert device_of(config, machines({"GPU": 2.0, kind: 1.0}), "H100").gpu
    wanted = bundles(config, True, 0, "H100")
    assert wanted[1:] == [{"CPU": 1.0, "GPU": 1.0, kind: 0.001}] * 2
    assert described(wanted) == f"2.5 CPU free, 2 GPU free, {kind}"


def node(name: str, alive: bool = True, group: str = "", **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Labels": {"ray.io/node-group": group}, "Resources": resources}


def test_one_unmanaged_machine_that_computes_cannot_grow():
    alone, head = node("a", CPU=4.0, memory=1e9), node("h", memory=4e9)
    assert machines_of([alone, node("b", alive=False, CPU=4.0)]) == Machines({"a": alone["Resources"]}, False)
    for nodes in ([head], [alone, head], [alone, node("b", CPU=1.0)], [node("a", group="headgroup", CPU=4.0)]):
        assert machines_of(nodes).can_grow
    found = machines_of([alone, head])
    assert (found.most("memory"), found.largest, found.num_cpus) == (1e9, "a", 4.0), "the head computes nothing"


def test_each_rank_has_a_bundle_with_a_gpu_of_its_own():
    config = EngineConfig(draft="some/model", tensor_parallel_size=4)
    assert bundles(config, gpu=True)[1:] == [{"CPU": 1.0, "GPU": 1.0}] * 4
    options = [runner_options(config, GROUP, rank, gpu=True) for rank in range(4)]
    assert [o["scheduling_strategy"].placement_group_bundle_index for o in options] == [1, 2, 3, 4]
    assert [o["num_gpus"] for o in options] == [0.9, 1.0, 1.0, 1.0], "the draft is beside rank 0"


@pytest.mark.parametrize(("draft", "draft_device"), [("none", "auto"), ("m", "auto"), ("m", "own"), ("m", "cpu")])
@pytest.mark.parametrize("gpu", [True, False])
def test_any_bundle_has_room_for_the_replica(draft: str, draft_device: str, gpu: bool):
    config = EngineConfig(draft=draft, draft_device=draft_device, tensor_parallel_size=2)
    actors = [engine_options(GROUP), *(runner_options(config, GROUP, rank, gpu) for rank in range(2))]
    actors += [draft_options(config, GROUP, gpu)] if config.has_draft_model else []
    free = [bundle["CPU"] for bundle in bundles(config, gpu)]
    for options in actors:
        free[options["scheduling_strategy"].placement_group_bundle_index] -= options["num_cpus"]
    assert min(free) >= SUPERVISOR_CPUS - 1e-9, "Serve of Ray 2.56 pins its replica to none"


def test_a_draft_is_beside_the_runner_or_on_a_gpu_of_its_own():
    beside, own = EngineConfig(draft="some/model"), EngineConfig(draft="some/model", draft_device="own")
    assert bundles(beside, gpu=True) == bundles(EngineConfig(), gpu=True)
    assert bundles(beside, gpu=False) == bundles(own, gpu=False) == bundles(EngineConfig(), gpu=False)
    assert len(bundles(own, gpu=True)) == 3
    assert not uses_gpu(own, {"GPU": 1.0})
    assert uses_gpu(own, {"GPU": 2.0})
    for config, gpu in ((beside, True), (beside, False), (EngineConfig(draft="m", draft_device="cpu"), True)):
        runner, draft = runner_options(config, GROUP, 0, gpu), draft_options(config, GROUP, gpu)
        assert runner["num_gpus"] + draft["num_gpus"] == gpu
        assert runner["num_cpus"] + draft["num_cpus"] + SUPERVISOR_CPUS == pytest.approx(RUNNER_CPUS)
        assert draft["scheduling_strategy"].placement_group_bundle_index == 1
    assert runner_options(own, GROUP, 0, True)["num_gpus"] == draft_options(own, GROUP, True)["num_gpus"] == 1.0
    assert draft_options(own, GROUP, True)["scheduling_strategy"].placement_group_bundle_index == 2
    with pytest.raises(CallboardError, match="draft_device=own needs 2 GPUs on one machine"):
        uses_gpu(EngineConfig(device="cuda", draft="m", draft_device="own"), {"GPU": 1.0})


def test_another_replica_needs_room_on_one_node():
    wanted = bundles(EngineConfig(), gpu=True)
    assert has_room(wanted, [{"CPU": 0.5}, {"CPU": 8.0, "GPU": 1.0, "memory": 1e9}])
    assert not has_room(wanted, [{"CPU": 8.0}, {"CPU": 0.5, "GPU": 4.0}])
    assert not has_room(wanted, [])
