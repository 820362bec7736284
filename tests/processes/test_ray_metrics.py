"""Figures of fronts and engines among Ray's own."""

import time
from contextlib import suppress

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families


def wait_for_answer(url: str) -> None:
    end = time.monotonic() + 300
    while True:
        with suppress(httpx.TransportError):
            httpx.get(url)
            return
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.rotated
@pytest.mark.thorough
def test_figures_reach_rays_own_exporter(ray_session):
    """Under the names of Ray's dashboard. Ray derives a histogram's sum from the middles of its buckets."""
    import ray

    @ray.remote
    class Publisher:
        async def publish(self):
            from actors.wire.metrics import MetricValues, Snapshot, all_at_zero
            from serve_app.observability.ray_metrics import RayMetrics

            metrics, engine = RayMetrics("m", "r1"), all_at_zero()
            await metrics.publish_engine("a", Snapshot(all_at_zero(), {"block_size": "16"}))
            engine.count("vllm:generation_tokens", by=7)
            engine.count("vllm:num_requests_running", by=2)
            engine.histograms["vllm:inter_token_latency_seconds"].observe(0.02, 300)
            engine.histograms["callboard:step_seconds"].observe(0.02)
            await metrics.publish_engine("a", Snapshot(engine, {"block_size": "16"}))
            await metrics.publish_engine("gone", Snapshot(engine, {"block_size": "16"}))
            metrics.clear_gauges(["a"])
            new = MetricValues()
            new.count("vllm:request_success", "stop", 3)
            await metrics.publish("a", new)

    (node,) = (n for n in ray.nodes() if n["Alive"])
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    wait_for_answer(url)  # Ray's agent starts after its node, and a worker does not wait for it long
    publisher = Publisher.remote()
    ray.get(publisher.publish.remote())
    want = {
        "ray_vllm_generation_tokens_total": 7,
        "ray_vllm_num_requests_running": 2,
        "ray_vllm_request_success_total": 3,
        "ray_vllm_inter_token_latency_seconds_count": 300,
        "ray_vllm_cache_config_info": 1,
    }
    end, found = time.monotonic() + 300, {}
    while not want.keys() <= found.keys() and time.monotonic() < end:
        time.sleep(0.5)
        text = httpx.get(url).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        mine = [s for s in samples if s.labels.get("ReplicaId") == "r1"]
        found |= {s.name: s.value for s in mine if s.labels["engine"] == "a"}
    assert {name: pytest.approx(value) for name, value in want.items()} == {name: found.get(name) for name in want}
    assert {s.value for s in mine if s.labels["engine"] == "gone" and "num_requests" in s.name} == {0}
