"""The page's engine view: figures and their explanations."""

import itertools
import re

from playwright.sync_api import expect


def test_engine_panel(visit, server):
    page = visit()
    page.wait_for_timeout(300)
    assert server.metrics_at == []  # the view is closed
    page.click("#tab-engine")
    page.wait_for_selector("#about span:text('since the start')")
    assert page.inner_text("#generated span") == "–"  # one reading gives no rate
    expect(page.locator("#generated span")).not_to_have_text("–")

    def figure(name: str) -> str:
        return page.inner_text(f"#{name} span")

    assert [figure(name) for name in ("running", "waiting", "kv")] == ["5", "7", "63 %"]
    assert 150 < float(figure("generated")) < 250
    assert figure("prompt-rate") == "0.0"
    assert figure("ttft") == "300 ms"
    page.click("#ttft")
    assert page.inner_text("#about span >> nth=0") == "mean of the last 2; 95 % within 500 ms"
    assert page.locator("#figures [aria-pressed=true]").all_inner_texts() == ["First token\n300 ms"]
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    num_seen = len(server.metrics_at)
    page.wait_for_timeout(2500)
    assert len(server.metrics_at) == num_seen
    page.evaluate("delete document.hidden")
    page.click("#tab-chat")
    page.context.route("**/metrics", lambda route: route.fulfill(status=404, json={"error": {"message": "Off."}}))
    page.click("#tab-engine")
    page.wait_for_selector("#engine-note:text('Off.')")


FULL = """
vllm:num_requests_running{engine="1"} 3
vllm:num_requests_waiting{engine="1"} 1
vllm:num_requests_running{engine="2"} 1
vllm:num_requests_waiting{engine="2"} 0
vllm:kv_cache_usage_perc{engine="1"} 0.95
vllm:kv_cache_usage_perc{engine="2"} 0.5
vllm:num_preemptions_total{engine="1"} 4
vllm:prefix_cache_queries_total{engine="1"} 1000
vllm:prefix_cache_hits_total{engine="1"} 625
vllm:request_queue_time_seconds_sum{engine="1"} 5
vllm:request_queue_time_seconds_count{engine="1"} 10
vllm:spec_decode_num_drafts_total{engine="1"} 100
vllm:spec_decode_num_draft_tokens_total{engine="1"} 400
vllm:spec_decode_num_accepted_tokens_total{engine="1"} 300
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 90
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 80
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="2"} 70
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="3"} 60
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="4"} 0
callboard:kv_tier_used_bytes{engine="1"} 3435973837
callboard:kv_tier_used_bytes{engine="2"} 3435973837
callboard:kv_tier_size_bytes{engine="1"} 68719476736
callboard:kv_tier_size_bytes{engine="2"} 68719476736
callboard:kv_tier_hit_tokens_total{engine="1"} 121000
callboard:kv_tier_hit_tokens_total{engine="2"} 4000
callboard:kv_tier_saved_seconds_total{engine="1"} 9.3
callboard:kv_tier_saved_seconds_total{engine="2"} 0.2
callboard:kv_tier_damaged_total{engine="1"} 0
callboard:kv_tier_damaged_total{engine="2"} 1
callboard:kv_tier_loads_in_flight{engine="1"} 2
callboard:kv_tier_loads_in_flight{engine="2"} 0
callboard:grammar_waits_total{engine="1"} 5
callboard:grammar_seconds_count{engine="1"} 3
callboard:restarts_total{engine="1",actor="engine"} 0
callboard:restarts_total{engine="1",actor="runners"} 2
callboard:requests_refused_total{engine="1",reason="busy"} 6
callboard:requests_refused_total{engine="1",reason="never"} 0
"""


def test_the_chart_shows_the_chosen_figure(visit, server):
    page = visit()
    page.click("#tab-engine")
    expect(page.locator("#generated span")).not_to_have_text("–")

    def points() -> list[list[float]]:
        return [[float(v) for v in pair.split(",")] for pair in page.get_attribute("#chart polyline", "points").split()]

    page.click("#kv")
    expect(page.locator("#chart polyline")).to_have_attribute("points", re.compile(r"\S+ \S+ \S+"))
    assert {height for _, height in points()} == {-0.625}
    assert page.inner_text("#chart span >> nth=0") == "100 %"
    assert all(a < b <= 1 for (a, _), (b, _) in itertools.pairwise(points()))  # each at its time within two minutes
    assert points()[0][0] > 0.5
    page.click("#waiting")
    assert {height for _, height in points()} == {-0.8}
    assert page.inner_text("#chart span >> nth=0") == "8.8"
    page.click("#between")
    assert page.get_attribute("#chart polyline", "points") == ""
    assert page.inner_text("#about span >> nth=0") == "none yet"


def test_the_table_of_engines_is_in_view(visit, server):
    page = visit()
    page.context.route("**/metrics", lambda route: route.fulfill(body=FULL))
    page.click("#tab-engine")
    expect(page.locator("#engine tbody tr")).to_have_count(2)
    expect(page.locator("#engine tbody tr >> nth=1")).to_be_in_viewport(ratio=1)
    tops = page.locator("#figures button:visible").evaluate_all("all => all.map(e => e.getBoundingClientRect().top)")
    assert len(tops) == 12
    assert len(set(tops)) == 2  # all optional figures together take a second row


def test_the_view_explains_its_figures(visit, server):
    page, answers = visit(), [FULL]
    # The second reading, which would show rates, never ends.
    page.context.route("**/metrics", lambda route: route.fulfill(body=answers.pop()) if answers else None)
    page.click("#tab-engine")
    page.wait_for_selector("#engine-state:text('4 requests are running; 1 more waits, as the KV cache has no room')")

    def card(name: str) -> str:
        page.click(f"#{name}")
        value, caption, about = page.locator(f"#{name} span, #about span").all_inner_texts()
        assert about == page.get_attribute(f"#{name}", "title")
        assert about.endswith(".")
        return f"{value}, {caption}"

    assert card("waiting") == "1, the last 10 waited 500 ms on average"
    assert card("kv") == "95 %, of the fullest engine, 4 places given up so far"
    assert card("prefix") == "63 %, of 1000 prompt tokens were known"
    by_position = "by position 90 %, 80 %, 70 %, 60 %"
    assert card("draft") == f"75 %, of 400 guesses were right: 4.0 tokens a step; {by_position}"
    assert card("tier") == "3.2 GiB, of 64 GiB, 1 damaged entry left out"
    assert card("tier-hits") == "125K, 9.5 s of computing saved since the start, 2 loads under way"
    assert card("grammars") == "2, of 5 wait for theirs"
    assert page.locator("#engine tbody tr").all_inner_texts() == ["1\t3\t1\t95 %\t–\t0\t2", "2\t1\t0\t50 %\t–\t0\t0"]
    assert page.inner_text("#refusals") == "Refused since the start: 6 because the queue was full."


def test_missing_figures_are_not_shown(visit, server):
    page = visit()
    page.context.route("**/metrics", lambda route: route.fulfill(body="# nothing"))
    page.click("#tab-engine")
    page.wait_for_selector("#engine-state:text('No engine tells its figures now')")
    assert not page.is_visible("#draft")
    assert not page.is_visible("#grammars")
    assert not page.is_visible("#tier")
    assert not page.is_visible("#tier-hits")
    page.click("#ttft")
    assert page.inner_text("#about span >> nth=0") == "none yet"
    idle = 'vllm:num_requests_running{engine="1"} 0\nvllm:num_requests_waiting{engine="1"} 0\n'
    page.context.route("**/metrics", lambda route: route.fulfill(body=idle))
    page.wait_for_selector("#engine-state:text('Nothing to do: no request is running, and none waits.')")
    paused = idle + 'callboard:paused{engine="1"} 1\n'
    page.context.route("**/metrics", lambda route: route.fulfill(body=paused))
    page.wait_for_selector("#engine-state .badge:text-is('paused')")
    two = paused + 'vllm:num_requests_running{engine="2"} 0\ncallboard:sleep_level{engine="2"} 2\n'
    page.context.route("**/metrics", lambda route: route.fulfill(body=two))
    page.wait_for_selector("#engine-state .badge:text-is('1 of 2 asleep, 1 of 2 paused')")
    page.context.route("**/metrics", lambda route: route.fulfill(body=idle))
    page.wait_for_selector("#engine-state:not(:has(.badge))")
