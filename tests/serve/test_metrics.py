"""Figures with exact values, of engines and of fronts that share them, read from GET /metrics by prometheus_client."""

import asyncio
import logging
import time
from dataclasses import replace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from actors.wire.metrics import METRICS, Histogram, MetricValues, Snapshot, all_at_zero
from runtime.base.types import Request, SamplingParams
from runtime.policy.admission import Admission
from serve_app.observability import ray_metrics as ray_metrics_module
from serve_app.observability.context import ChoiceStats
from serve_app.observability.ray_metrics import RayMetrics
from tests.support.engine import links
from tests.support.engine.fake_runner import FixedShare
from tests.support.engine.links import Engine, eventually, link_to
from tests.support.http.fake_engine import FakeEngine, client_of
from tests.support.http.metrics import MODEL, Fronts, complete, parsed


async def test_every_metric_exists_from_the_start(fronts):
    text = (await fronts.clients[0].get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {f.removesuffix("_total") for f in families} == {
        *(name.removesuffix("_total") for name in METRICS),
        "callboard:engines",
        *(f"vllm:{name}" for name in ("cache_config_info", "lora_requests_info", "engine_sleep_state")),
        *(f"vllm:{name}" for name in ("num_requests_swapped", "gpu_cache_usage_perc", "time_per_output_token_seconds")),
    }
    for name, metric in METRICS.items():
        assert families[name].type == metric.kind
        for sample in families[name].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL, "0")
            assert sample.value == 0 or name == "vllm:kv_cache_usage_perc" or name.startswith("process_")
    (info,) = families["vllm:cache_config_info"].samples
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"], info.value) == ("4", "199", 1)
    assert (info.labels["model_name"], info.labels["weights"]) == (MODEL, "dense")


async def test_a_known_load_gives_exact_counts(fronts):
    """8 requests of 10 + 6 tokens, three with a common prompt, one with two choices, a stream, and an invalid one."""
    client = fronts.clients[0]
    answers = await asyncio.gather(*(complete(client, [10 + i] * 10, 6) for i in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    first = await complete(client, [7] * 9, 3)  # its first two blocks of 4 are cached for the next one
    again = await complete(client, [7] * 9, 3)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    token = sequence(first)[0]
    stopped = await complete(client, [7] * 9, 5, stop_token_ids=[token])
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    two = await complete(client, [5] * 4, 2, n=2)
    assert two.status_code == 200
    assert (await complete(client, [9] * 5, 400, stream=True)).text.endswith("data: [DONE]\n\n")
    bad = await complete(client, [9] * 600, 5)
    assert bad.status_code == 400

    samples = await fronts.scrape()
    assert samples["vllm:request_success_total,finished_reason=length"] == 8 + 2 + 2 + 1
    assert samples["vllm:request_success_total,finished_reason=stop"] == 1
    assert samples["vllm:request_success_total,finished_reason=abort"] == 0
    prompt, output = 8 * 10 + 3 * 9 + 2 * 4 + 5, 8 * 6 + 3 + 3 + 1 + 2 * 2 + 400
    assert samples["vllm:prompt_tokens_total"] == samples["vllm:request_prompt_tokens_sum"] == prompt
    assert samples["vllm:generation_tokens_total"] == samples["vllm:request_generation_tokens_sum"] == output
    assert samples["vllm:request_prompt_tokens_bucket,le=5.0"] == 3
    assert samples["vllm:request_prompt_tokens_bucket,le=10.0"] == 14
    assert samples["vllm:prefix_cache_queries_total"] == prompt
    assert samples["vllm:prefix_cache_hits_total"] == 16
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time", "request_inference_time"):  # fmt: skip
        assert samples[f"vllm:{name}_seconds_count"] == 14, name
    assert samples["vllm:inter_token_latency_seconds_count"] == output - 14
    assert samples["vllm:request_time_per_output_token_seconds_count"] == 13
    assert samples["callboard:delivery_lag_seconds_count"] == 14
    assert samples["vllm:iteration_tokens_total_sum"] == prompt + output
    assert samples["vllm:iteration_tokens_total_count"] >= 400
    assert samples["vllm:request_params_max_tokens_count"] == 14
    assert samples["vllm:request_params_max_tokens_sum"] == 8 * 6 + 3 + 3 + 5 + 2 * 2 + 400
    assert (samples["vllm:request_params_n_count"], samples["vllm:request_params_n_sum"]) == (13, 14)
    assert samples["vllm:request_params_n_bucket,le=1.0"] == 12
    longest = "vllm:request_max_num_generation_tokens"
    assert (samples[f"{longest}_count"], samples[f"{longest}_sum"]) == (13, output - 2)
    assert samples["callboard:ingress_seconds_count"] == 14
    # The latencies of a request's tokens add up to its time of decoding, on whichever side they are measured.
    between, decode = samples["vllm:inter_token_latency_seconds_sum"], samples["vllm:request_decode_time_seconds_sum"]
    assert between == pytest.approx(decode, abs=0.05)
    assert samples["callboard:step_seconds_count"] == samples["callboard:engine_wait_seconds_count"]
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0


async def test_a_late_reader_does_not_delay_the_first_token_time():
    engine = Engine(delay_s=0.01)
    link = link_to(engine)
    await link.start()
    choice = ChoiceStats(Request("r", [1, 2, 3], 3, SamplingParams(max_tokens=20, ignore_eos=True)))
    outputs = link.generate(choice.request)
    try:
        first = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)  # the request is on its way
        time.sleep(0.5)  # the event loop, and so the reader, stops while tokens arrive
        choice.note(await first)
        async for output in outputs:
            choice.note(output)
        assert choice.num_output == 20
        assert 0 < choice.first_at < choice.last_at
    finally:
        link.close()
        engine.loop.close()


def sequence(answer: httpx.Response) -> list[int]:
    """The token ids of an answer by a tokenizer with one token a byte."""
    return list(answer.json()["choices"][0]["text"].encode())


async def test_aborted_and_refused_requests_are_counted():
    fronts = Fronts(Engine(delay_s=0.01, max_num_seqs=1, max_queued_requests=1))
    client = await fronts.add()
    try:
        tasks = []
        for place in ("running", "waiting"):
            tasks.append(asyncio.create_task(complete(client, [7] * 5, 300)))
            await eventually(lambda place=place: fronts.engines[0].loop.stats()[place] == 1)
        busy = await complete(client, [8] * 5, 5)
        assert busy.status_code == 429
        samples = await fronts.scrape()
        assert (samples["vllm:num_requests_running"], samples["vllm:num_requests_waiting"]) == (1, 1)
        assert samples["vllm:kv_cache_usage_perc"] > 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: not any(fronts.engines[0].loop.stats()[s] for s in ("running", "waiting")))
        samples = await fronts.scrape()
        assert samples["callboard:requests_refused_total,reason=busy"] == 1
        assert samples["vllm:request_success_total,finished_reason=abort"] == 2
        assert samples["vllm:time_to_first_token_seconds_count"] <= 1  # the other one waited all the time
        assert samples["vllm:e2e_request_latency_seconds_count"] == 2
        assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
        assert samples["vllm:kv_cache_usage_perc"] == 0
    finally:
        await fronts.close()


async def test_a_preempted_request_waits_longer_between_two_tokens(monkeypatch):
    """Memory for less than both requests: the latencies of tokens still add up to the time of decoding."""
    monkeypatch.setattr(links, "INFO", replace(links.INFO, eos_token_ids=(), num_kv_blocks=40))
    engine = Engine()
    fronts = Fronts(engine)
    client = await fronts.add()
    try:
        engine.loop.core.extras[Admission].lengths = FixedShare(0.0)  # admits both at once, wrongly
        answers = [complete(client, [i] * 20, 100, ignore_eos=False) for i in (3, 4)]
        assert [a.json()["usage"]["completion_tokens"] for a in await asyncio.gather(*answers)] == [100, 100]
        samples = await fronts.scrape()
        assert samples["vllm:num_preemptions_total"] == engine.loop.stats()["preemptions"] > 0
        between = samples["vllm:inter_token_latency_seconds_sum"]
        assert between == pytest.approx(samples["vllm:request_decode_time_seconds_sum"], abs=0.05)
        assert samples["vllm:inter_token_latency_seconds_count"] == 198
        assert samples["vllm:request_queue_time_seconds_count"] == 2
    finally:
        await fronts.close()


async def test_counts_of_all_fronts_are_summed_and_kept():
    fronts = Fronts(Engine(), Engine())
    clients = [await fronts.add(), await fronts.add()]
    try:
        for i, client in enumerate(clients):
            await asyncio.gather(*(complete(client, [10 + i, j] * 4, 5) for j in range(6 + i)))
        one, other = await fronts.scrape(0), await fronts.scrape(1)
        counts = [name for name in one if name.endswith(("_total", "_count", "_bucket")) or "_bucket," in name]
        assert {name: one[name] for name in counts} == {name: other[name] for name in counts}
        assert one["vllm:request_success_total,finished_reason=length"] == 13
        assert one["vllm:generation_tokens_total"] == 65
        text = (await clients[0].get("/metrics")).text
        by_engine = {
            s.labels["engine"]: s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
            if s.name == "vllm:request_generation_tokens_count"
        }
        assert sum(by_engine.values()) == 13
        assert all(by_engine[e] > 0 for e in "01"), "the least loaded engine gets the next request"

        fronts.links[1].close()  # it dies
        del fronts.services[1]
        await complete(clients[0], [3] * 8, 5)
        after = await fronts.scrape(0)
        assert all(after[name] >= one[name] for name in counts)
        assert after["vllm:request_success_total,finished_reason=length"] == 14
    finally:
        await fronts.close()


async def test_counts_during_an_outage_reach_the_engine_later(fronts):
    client, engine = fronts.clients[0], fronts.engines[0]
    await complete(client, [3] * 8, 5)
    engine.die()
    await eventually(lambda: fronts.links[0].health() is not None)
    assert (await client.get("/metrics")).status_code == 200
    engine.restart()
    await eventually(lambda: fronts.links[0].health() is None)
    samples = await fronts.scrape()
    assert samples["vllm:request_success_total,finished_reason=length"] == 1
    assert samples["vllm:generation_tokens_total"] == 0  # of the new engine


async def test_lost_runners_count_as_restarts(fronts):
    task = asyncio.create_task(complete(fronts.clients[0], [3] * 8, 200))
    await eventually(lambda: fronts.engines[0].loop.core.scheduler.stats.steps > 5)
    fronts.engines[0].runners[-1].dead = "killed"
    assert (await task).status_code == 200
    samples = await fronts.scrape()
    assert samples["callboard:restarts_total,actor=runners"] == 1
    assert samples["callboard:restarts_total,actor=engine"] == 0
    assert samples["vllm:inter_token_latency_seconds_count"] == 199


async def test_a_stop_string_counts_as_stop_not_as_abort():
    engine = FakeEngine("abcdef")
    async with client_of(engine) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "stop": "c", "max_tokens": 9})
        assert answer.json()["choices"][0]["text"] == "ab"
        samples = parsed((await client.get("/metrics")).text)
    assert engine.aborted
    assert samples["vllm:request_success_total,finished_reason=stop"] == 1
    assert samples["vllm:request_generation_tokens_sum"] == 3


async def test_a_request_has_one_log_line_without_its_text(caplog):
    caplog.set_level(logging.INFO, "ray.serve")
    async with client_of(FakeEngine("secret answer")) as client:
        await client.post(
            "/v1/completions",
            json={"prompt": "secret question", "n": 2, "max_tokens": 4},
            headers={"x-request-id": "abc"},
        )
    async with client_of(FakeEngine(busy=True)) as client:
        await client.post("/v1/completions", json={"prompt": "secret question"})
    good, busy = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request ")]
    fields = dict(field.split("=", 1) for field in good.removeprefix("request ").split())
    assert fields["id"] == "cmpl-abc"
    assert (fields["status"], fields["finish_reason"]) == ("200", "length,length")
    assert (fields["prompt_tokens"], fields["output_tokens"]) == ("30", "8")
    assert float(fields["ttft_s"]) <= float(fields["total_s"])
    assert "status=429" in busy
    assert "secret" not in good + busy


@settings(deadline=None)  # a busy machine does not fail the test
@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))), st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)))
)
def test_histograms_of_all_observers_add_up(mine, others):
    bounds = (0.5, 1, 5, 50)
    one, two, both = Histogram.of(bounds), Histogram.of(bounds), Histogram.of(bounds)
    for histogram, observed in ((one, mine), (two, others), (both, mine + others)):
        for value, count in observed:
            histogram.observe(value, count)
    one.add(two)
    assert one.counts == both.counts
    assert sum(one.sums) == pytest.approx(sum(both.sums))
    for (bound, at_most), limit in zip(both.cumulative(), (*bounds, float("inf")), strict=True):
        assert float(bound) == limit
        assert at_most == sum(count for value, count in mine + others if value <= limit)
    one.add(two, -1)
    assert one.counts == [a - b for a, b in zip(both.counts, two.counts, strict=True)]


async def test_expected_and_actual_hits_are_counted():
    """With a single engine, no hits are expected."""
    fronts = Fronts(Engine(), Engine())
    client = await fronts.add()
    try:
        group = fronts.links[0]
        await eventually(lambda: [group._router.held(name) for name in group.links] == [set(), set()])
        await complete(client, [7] * 20, 3)
        await eventually(lambda: any(group._router.held(name) for name in group.links))
        await complete(client, [7] * 18, 3)
        samples = await fronts.scrape()
        for kind in ("expected", "found"):
            assert samples[f"callboard:routed_cached_tokens_total,kind={kind}"] == 16
    finally:
        await fronts.close()


async def test_a_stream_that_moved_is_counted_once():
    """Its first engine is lost for good, and its counts go to the other."""
    fronts = Fronts(Engine(delay_s=0.01), Engine(delay_s=0.01))
    client = await fronts.add()
    try:
        await asyncio.gather(*(complete(client, [20 + i] * 8, 5) for i in range(4)))
        task = asyncio.create_task(complete(client, [3] * 8, 60))
        await eventually(lambda: any(e.loop.stats()["running"] for e in fronts.engines))
        first, second = sorted(fronts.engines, key=lambda e: e.loop.stats()["running"], reverse=True)
        num_steps = first.loop.core.scheduler.stats.steps
        await eventually(lambda: first.loop.core.scheduler.stats.steps > num_steps + 10)
        first.die()
        assert (await task).json()["usage"]["completion_tokens"] == 60
        samples = await fronts.scrape()
        assert samples["vllm:request_success_total,finished_reason=length"] == 5
        assert samples["vllm:request_prompt_tokens_sum"] == 40
        assert samples["vllm:request_generation_tokens_sum"] == 80
        assert samples["vllm:request_queue_time_seconds_count"] == 5
        moved = second.loop.report(MetricValues()).figures.numbers["vllm:prompt_tokens"][""]
        assert moved == 8 * (second.loop.core.scheduler.stats.prompt_tokens // 8 - 1)  # without the newcomer
    finally:
        await fronts.close()


def test_lengths_have_vllms_buckets():
    bounds = METRICS["vllm:request_prompt_tokens"].bounds
    assert bounds[:7] == (1, 2, 5, 10, 20, 50, 100)
    assert bounds[-4:] == (100_000, 200_000, 500_000, 1_000_000)
    assert not MetricValues()


class RayMetric:
    """A metric of Ray that counts its updates."""

    def __init__(self, *about, **keys):
        self.num_told = 0

    def set(self, value, tags):
        self.num_told += 1

    inc = observe = set


@pytest.fixture
def ray_figures(monkeypatch):
    for kind in ("Gauge", "Counter", "Histogram"):
        monkeypatch.setattr(ray_metrics_module.ray_metrics, kind, RayMetric)
    return RayMetrics(MODEL, "r1")


async def test_removed_engines_cost_nothing(ray_figures):
    """Scaling from zero creates an engine with a new id each time."""
    for i in range(200):
        await ray_figures.publish_engine(str(i), Snapshot(all_at_zero(), {}))
        ray_figures.clear_gauges([str(i)])
    gauge = ray_figures._metric("vllm:num_requests_running")
    assert gauge.num_told == 200 + 199, "once while it lives, once at its end"
    assert len(ray_figures._last) <= 1 + ray_metrics_module._MAX_GONE


async def test_reports_go_on_after_one_failed(monkeypatch, caplog, fronts, ray_figures):
    monkeypatch.setattr("serve_app.observability.metrics._REPORT_PERIOD_S", 0.01)
    metrics, results = fronts.services[0].metrics, []

    def publishes_engines():
        results.append(len(results))
        if len(results) == 1:
            raise ValueError("no rank yet")
        return True

    task = asyncio.create_task(metrics.run(ray_figures, publishes_engines))
    await eventually(lambda: ray_figures._last or task.done())
    assert not task.done()
    assert "metrics could not be reported" in caplog.text
    task.cancel()
