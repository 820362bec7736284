"""Metrics by vLLM's older names, the state of engines, and the memory and CPU time of processes."""
# fixtures are named twice: where they come from, and as arguments

import time

import pytest

from tests.support.engine.links import Engine, eventually
from tests.support.http.metrics import Fronts, complete, parsed


async def test_old_and_new_metric_names_have_equal_values(fronts):
    await complete(fronts.clients[0], [1] * 5, 4)
    samples = await fronts.scrape()
    for older, name in (("time_per_output_token", "inter_token_latency"), ("gpu_cache_usage", "kv_cache_usage")):
        values = {key: value for key, value in samples.items() if key.startswith(f"vllm:{older}")}
        assert values == {key.replace(name, older): v for key, v in samples.items() if key.startswith(f"vllm:{name}")}
        assert values
    assert samples["vllm:time_per_output_token_seconds_count"] == 3
    assert samples["vllm:num_requests_swapped"] == 0


async def test_the_sleep_state_is_one_of_three(fronts):
    async def states() -> dict[str, float]:
        samples = await fronts.scrape()
        return {key.partition("sleep_state=")[2]: v for key, v in samples.items() if "engine_sleep_state" in key}

    assert await states() == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    await fronts.links[0].sleep(1)
    assert await states() == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}


async def test_memory_and_cpu_time_of_engine_and_fronts():
    engine = Engine()
    fronts = Fronts(engine)
    await fronts.add()
    await fronts.add()
    memory, cpu = "process_resident_memory_bytes,role=", "process_cpu_seconds_total,role="
    try:
        samples = await fronts.scrape()
        own = samples[f"{memory}engine"]  # engine and fronts are this one process here
        assert own > 10 << 20
        assert samples[f"{memory}front"] == pytest.approx(2 * own, rel=0.5)
        assert samples[f"{memory}runner"] == samples[f"{memory}draft"] == 0
        burn = time.process_time() + 0.05
        while time.process_time() < burn:
            pass
        later = await fronts.scrape()
        assert later[f"{cpu}engine"] > samples[f"{cpu}engine"]
        assert later[f"{cpu}front"] > samples[f"{cpu}front"]
        fronts.links[1].close()
        await eventually(lambda: len(engine.loop._connections) == 1)
        gone = parsed((await fronts.clients[0].get("/metrics")).text)
        assert gone[f"{memory}front"] < 1.5 * own
        assert gone[f"{cpu}front"] >= later[f"{cpu}front"]
    finally:
        await fronts.close()
