"""Functions that are defined on the page: the model's calls, and results written by hand."""

import json

import pytest
from playwright.sync_api import expect

from tests.support.http.chats import QWEN
from tests.support.http.fake_engine import byte_tokenizer
from tests.support.http.page_browser import ask, is_answered, open_settings

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city", "parameters": CITY}
TIME = {"name": "time", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = CALL.replace("Paris", "<img src=x onerror=window.hit=1>")


@pytest.fixture
def caller(server):
    server.service.start(byte_tokenizer(QWEN))
    server.answers(CALL)
    server.engine.group = 64
    yield server
    server.service.start(byte_tokenizer())


def define(page, functions: object, choice: str = "") -> None:
    open_settings(page)
    page.fill("#chat [name=functions]", json.dumps(functions))
    page.select_option("#chat [name=function_choice]", choice)


def sent(page, act) -> dict:
    with page.expect_request("**/v1/chat/completions") as asked:
        act()
    return asked.value.post_data_json


def test_a_call_is_answered_by_hand(visit, caller):
    page = visit()
    define(page, WEATHER)
    assert page.locator("#chat .chips li").all_inner_texts() == ["functions×"]
    body = sent(page, lambda: ask(page, "Weather in Paris?"))
    assert body["tools"] == [{"type": "function", "function": {**WEATHER, "strict": True}}]
    assert body["tool_choice"] == "auto"
    is_answered(page, 1)
    assert caller.engine.requests[-1].params.grammar is not None
    assert page.inner_text(".calls figcaption span") == "Call of weather"
    assert json.loads(page.inner_text(".calls pre")) == {"city": "Paris"}
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    page.fill("[aria-label='Result of weather']", "Sunny")
    caller.answers("It is sunny.")
    page.fill("#message", "A draft")
    page.click("button:text('Send result')")
    is_answered(page, 2)
    assert page.inner_text(".text >> nth=1") == "It is sunny."
    assert page.input_value("#message") == "A draft"
    prompt = caller.prompt()
    assert prompt.index("Weather in Paris?") < prompt.index(CALL) < prompt.index("<|tool weather|>Sunny")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.locator(".calls figcaption span").all_inner_texts() == ["Call of weather", "Result"]
    ask(page, "Thanks.")
    is_answered(page, 3)
    assert "<|tool weather|>Sunny" in caller.prompt()


def test_a_call_can_be_demanded(visit, caller):
    caller.answers(CALL.partition('"name": "')[2])  # the prompt ends with the opening
    page = visit()
    define(page, [WEATHER, {"type": "function", "function": TIME}], "function time")
    page.check("#chat [name=functions_lenient]")
    body = sent(page, lambda: ask(page, "Well?"))
    assert body["tool_choice"] == {"type": "function", "function": {"name": "time"}}
    assert [tool["function"]["strict"] for tool in body["tools"]] == [False, False]
    is_answered(page, 1)
    page.select_option("#chat [name=function_choice]", "required")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.locator("#chat .chips li").all_inner_texts() == ["functions, a call demanded×"]
    assert sent(page, lambda: ask(page, "And?"))["tool_choice"] == "required"
    is_answered(page, 2)
    page.fill("[aria-label='Result of weather']", "Sunny")
    caller.answers("It is sunny.")
    body = sent(page, lambda: page.click("button:text('Send result')"))
    assert body["tool_choice"] == "auto"  # else the model could never end
    assert body["messages"][-1] == {
        "role": "tool",
        "tool_call_id": body["messages"][-1]["tool_call_id"],
        "content": "Sunny",
    }
    is_answered(page, 3)
    page.click("#chat .chips button")
    assert "tools" not in sent(page, lambda: ask(page, "Bye."))


@pytest.mark.parametrize("text", ["{", '{"parameters": {}}', "[null]", '"weather"', "[]x"])
def test_faulty_functions_are_not_sent(visit, caller, text: str):
    page = visit()
    open_settings(page)
    page.fill("#chat [name=functions]", text)
    expect(page.locator("#chat .parts .verdict")).to_contain_text("Functions:")
    ask(page, "Well?")
    expect(page.locator(".answer [role=alert]")).to_contain_text("Functions:")
    assert caller.engine.requests == []


def test_again_and_compare_know_calls(visit, caller):
    page = visit()
    define(page, WEATHER)
    ask(page, "Weather in Paris?")
    is_answered(page, 1)
    page.click(".again:text('Again')")
    page.wait_for_selector(".repeated:text('the same answer, to the character')")
    caller.answers(OTHER)
    page.click(".again:text('Again')")
    page.wait_for_selector(".repeated:text('another answer from character')")
    page.click(".again:text('Compare')")
    page.wait_for_selector(".other[aria-busy=false] .calls pre")
    assert "onerror" in page.inner_text(".other .calls pre")
    assert page.locator(".calls img").count() == 0
    assert page.evaluate("window.hit") is None


def test_a_result_is_sent_again_after_a_failure(visit, caller):
    page = visit()
    define(page, WEATHER)
    ask(page, "Weather in Paris?")
    is_answered(page, 1)
    page.fill("[aria-label='Result of weather']", "Sunny")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.click("button:text('Send result')")
    page.wait_for_selector("[role=alert]:text('cannot be reached')")
    page.unroute("**/v1/chat/completions")
    caller.answers("It is sunny.")
    assert page.input_value("[aria-label='Result of weather']") == "Sunny"
    page.click("button:text('Send result')")
    page.wait_for_selector(".text p:text('It is sunny.')")
    assert page.locator("[role=alert]").count() == 0
