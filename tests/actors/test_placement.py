"""The placement of actors, as plain functions of the cluster's resources."""

import pytest
from ray.util.placement_group import PlacementGroup

from actors.ray.placement import bundles, default_fronts, draft_options, has_room, runner_options, uses_gpu
from runtime.spec.config import EngineConfig
from runtime.spec.types import CallboardError

GROUP = PlacementGroup.empty()


@pytest.mark.parametrize(("cpus", "fronts"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (17.5, 4), (128, 4)])
def test_the_number_of_fronts_follows_the_cpus(cpus, fronts):
    assert default_fronts({"CPU": float(cpus)}) == fronts


def test_a_cluster_without_known_cpus_gets_one_front():
    assert default_fronts({}) == 1


@pytest.mark.parametrize(
    ("device", "gpus", "want"), [("auto", 0, False), ("auto", 1, True), ("cpu", 1, False), ("cuda", 1, True)]
)
def test_runners_get_gpus_if_the_cluster_has_any(device, gpus, want):
    config = EngineConfig(device=device)
    assert uses_gpu(config, [{"CPU": 4.0, "GPU": float(gpus)}]) is want
    assert ("GPU" in bundles(config, want)[1]) is want


def test_too_few_gpus_are_reported():
    """All ranks are on one machine. Who has GPUs does not want a large model on the CPU."""
    one_each = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}]
    for device in ("auto", "cuda"):
        config = EngineConfig(device=device, tensor_parallel_size=2)
        with pytest.raises(CallboardError, match=r"size=2 needs 2 GPUs on one machine, but .* have 1 at most"):
            uses_gpu(config, one_each)
        assert uses_gpu(config, [*one_each, {"GPU": 4.0}])
    assert not uses_gpu(EngineConfig(tensor_parallel_size=2), [{"CPU": 8.0}])
    assert not uses_gpu(EngineConfig(device="cpu", tensor_parallel_size=2), one_each)
    with pytest.raises(CallboardError, match="needs 2 GPUs on one machine, but the Ray cluster's machines have 0"):
        uses_gpu(EngineConfig(device="cuda", tensor_parallel_size=2), [])


def test_gpus_are_planned_while_only_the_head_exists():
    head = [{"memory": 4e9, "node:10.0.0.1": 1.0}]  # `ray start --head --num-cpus=0`, as KubeRay builds applications
    assert uses_gpu(EngineConfig(device="cuda", tensor_parallel_size=2), head)
    assert not uses_gpu(EngineConfig(device="auto"), head)


def test_each_rank_has_a_bundle_with_a_gpu_of_its_own():
    config = EngineConfig(draft="some/model", tensor_parallel_size=4)
    assert bundles(config, gpu=True)[1:] == [{"CPU": 1.0, "GPU": 1.0}] * 4
    options = [runner_options(config, GROUP, rank, gpu=True) for rank in range(4)]
    assert [o["scheduling_strategy"].placement_group_bundle_index for o in options] == [1, 2, 3, 4]
    assert [o["num_gpus"] for o in options] == [0.9, 1.0, 1.0, 1.0], "the draft is beside rank 0"


def test_a_draft_is_beside_the_runner_or_on_a_gpu_of_its_own():
    beside, own = EngineConfig(draft="some/model"), EngineConfig(draft="some/model", draft_device="own")
    assert bundles(beside, gpu=True) == bundles(EngineConfig(), gpu=True)
    assert bundles(beside, gpu=False) == bundles(own, gpu=False) == bundles(EngineConfig(), gpu=False)
    assert len(bundles(own, gpu=True)) == 3
    assert not uses_gpu(own, [{"GPU": 1.0}])
    assert uses_gpu(own, [{"GPU": 2.0}])
    for config, gpu in ((beside, True), (beside, False), (EngineConfig(draft="m", draft_device="cpu"), True)):
        runner, draft = runner_options(config, GROUP, 0, gpu), draft_options(config, GROUP, gpu)
        for resource in ("num_cpus", "num_gpus"):
            assert runner[resource] + draft[resource] == (1.0 if gpu or resource == "num_cpus" else 0.0)
        assert draft["scheduling_strategy"].placement_group_bundle_index == 1
    assert runner_options(own, GROUP, 0, True)["num_gpus"] == draft_options(own, GROUP, True)["num_gpus"] == 1.0
    assert draft_options(own, GROUP, True)["scheduling_strategy"].placement_group_bundle_index == 2
    with pytest.raises(CallboardError, match="draft_device=own needs 2 GPUs on one machine"):
        uses_gpu(EngineConfig(device="cuda", draft="m", draft_device="own"), [{"GPU": 1.0}])


def test_another_replica_needs_room_on_one_node():
    wanted = bundles(EngineConfig(), gpu=True)
    assert has_room(wanted, [{"CPU": 0.5}, {"CPU": 8.0, "GPU": 1.0, "memory": 1e9}])
    assert not has_room(wanted, [{"CPU": 8.0}, {"CPU": 0.5, "GPU": 4.0}])
    assert not has_room(wanted, [])
