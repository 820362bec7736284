"""Where the actors go, as plain functions of what the cluster has."""

import pytest

from actors.placement import bundles, default_fronts, uses_gpu
from runtime.core.config import EngineConfig
from runtime.core.types import CallboardError


@pytest.mark.parametrize(("cpus", "fronts"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (17.5, 4), (128, 4)])
def test_fronts_come_with_the_cpus(cpus, fronts):
    assert default_fronts({"CPU": float(cpus)}) == fronts


def test_a_cluster_that_tells_no_cpus_gets_one_front():
    assert default_fronts({}) == 1


@pytest.mark.parametrize(
    ("device", "gpus", "want"), [("auto", 0, False), ("auto", 1, True), ("cpu", 1, False), ("cuda", 1, True)]
)
def test_runners_get_gpus_where_there_are_some(device, gpus, want):
    config = EngineConfig(device=device)
    assert uses_gpu(config, {"CPU": 4.0, "GPU": float(gpus)}) is want
    assert ("GPU" in bundles(config, want)[1]) is want


def test_too_few_gpus_are_told():
    with pytest.raises(CallboardError, match="tensor_parallel_size=2 needs that many GPUs, but the Ray cluster has 1"):
        uses_gpu(EngineConfig(device="cuda", tensor_parallel_size=2), {"GPU": 1.0})
