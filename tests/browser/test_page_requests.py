"""The page's requests: copied as a command or a program, bound to a form, and sent again."""

import json
import os
import subprocess
import sys

import pytest
from playwright.sync_api import expect

from tests.support.http.page_browser import ANSWER, ask, is_answered, open_settings

CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}
HARD_TEXT = "It's \"hard\": $HOME `id` \\n \\ 日本 😀\n'''JSON\nJSON\n--"


def copied(page, view: str, form: str) -> str:
    page.click(f"#{view} .menu button:text('{form}')")
    page.wait_for_selector(f"#{view} .menu button:text('Copied')")
    return page.evaluate("navigator.clipboard.readText()")


def run(form: str, text: str) -> str:
    """The output of the copied command or program."""
    command = ["bash", "-c", text] if form == "curl" else [sys.executable, "-c", text]
    env = {**os.environ, "CALLBOARD_API_KEY": "secret"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_engine_saw(request) -> tuple:
    return request.token_ids, request.params, request.seed


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("form", "is_bound"), [("curl", True), ("curl", False), ("Python", True), ("Python", False)])
def test_a_copied_chat_sends_the_same_request(visit, server, form: str, is_bound: bool):
    page = visit(**CLIPBOARD)
    open_settings(page)
    page.fill("#system", "Be 'brief'.")
    page.fill("#chat [name=temperature]", "0.25")
    page.fill("#chat [name=top_k]", "7")
    if is_bound:
        page.select_option("#chat [name=structure]", "schema")
        page.fill("#chat [name=structure_text]", '{"enum": ["\'", null, true, 1.5, {}, [], "false"]}')
    else:
        page.click("#chat .more > summary")
        page.fill("#chat [name=stop]", "zz\n\\n\\n")
        page.fill("#chat [name=logit_bias]", "65 -2.5")
        page.check("#chat [name=ignore_eos]")
    ask(page, "One?")
    is_answered(page, 1)
    page.fill("#message", HARD_TEXT)
    text = copied(page, "chat", form)  # nothing is sent yet
    page.press("#message", "Enter")
    is_answered(page, 2)
    by_page = as_engine_saw(server.engine.requests[-1])
    out = run(form, text)
    assert as_engine_saw(server.engine.requests[-1]) == by_page
    assert len(server.engine.requests) == 3
    assert copied(page, "chat", form) == text  # of the last request
    answer = page.evaluate("JSON.parse(localStorage.getItem('callboard-chats'))[0].turns[1].text")
    if form == "Python":
        assert out == answer + "\n"
    else:
        events = [json.loads(line[6:]) for line in out.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == answer
        assert {choice["seed"] for choice in choices if "seed" in choice} == {by_page[2]}


@pytest.mark.parametrize("form", ["curl", "Python"])
def test_a_copied_completion_sends_the_same_request(visit, server, form: str):
    page = visit(**CLIPBOARD)
    page.click("#tab-completion")
    open_settings(page, "completion")
    page.check("[name=logprobs]")
    page.fill("#completion [name=min_p]", "0.25")
    page.fill("#prompt", HARD_TEXT)
    text = copied(page, "completion", form)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#output-note:text('tokens')")
    by_page = as_engine_saw(server.engine.requests[-1])
    out = run(form, text)
    assert as_engine_saw(server.engine.requests[-1]) == by_page
    assert len(server.engine.requests) == 2
    if form == "Python":
        assert out.startswith("A **bow**:")


def test_a_copy_names_the_key_by_its_variable(visit, server):
    page = visit(**CLIPBOARD)
    page.evaluate("sessionStorage.setItem('callboard-key', 'top-secret')")
    page.fill("#message", "Hello")
    command, program = copied(page, "chat", "curl"), copied(page, "chat", "Python")
    assert "Bearer $CALLBOARD_API_KEY" in command
    assert 'os.environ.get("CALLBOARD_API_KEY", "none")' in program
    assert "top-secret" not in command + program


def test_without_a_request_nothing_is_copied(visit, server):
    page = visit(**CLIPBOARD)
    page.click("#chat .menu button:text('curl')")
    page.wait_for_selector("#chat .menu button:text('Write something first')")
    page.wait_for_selector("#chat .menu button:text('curl')")


SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'


def test_a_schema_binds_the_answer(visit, server):
    server.answers('{"city": "New_York_*x*_"}')
    page = visit()
    open_settings(page)
    page.select_option("#chat [name=structure]", "schema")
    assert page.get_attribute("#chat [name=structure_text]", "placeholder").startswith('{"type": "object"')
    page.fill("#chat [name=structure_text]", SCHEMA)
    page.wait_for_selector("#chat .verdict:text('Every answer will fit the schema.')")
    ask(page, "Where?")
    is_answered(page, 1)
    assert server.engine.requests[-1].params.grammar is not None
    assert page.inner_text(".text pre") == '{"city": "New_York_*x*_"}'  # it is not shown as Markdown
    assert "fits the schema" in page.inner_text(".answer footer")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.inner_text(".text pre") == '{"city": "New_York_*x*_"}'
    open_settings(page)
    assert page.input_value("#chat [name=structure_text]") == SCHEMA
    page.click("#chat .reset")
    assert not page.is_visible("#chat [name=structure_text]")
    server.answers("Free.")
    ask(page, "And?")
    is_answered(page, 2)
    assert server.engine.requests[-1].params.grammar is None


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("schema", '{"type": "object"', "The schema is not JSON: expected ',' or '}' after property value"),
        ("schema", '{"not": {}}', "response_format.json_schema.schema"),
        ("regex", "a(b", "structured_outputs.regex"),
        ("grammar", "root ::= missing", "missing"),
        ("grammar", 'start: "a', "structured_outputs.grammar"),
    ],
)
def test_a_faulty_form_is_reported_and_not_sent(visit, server, kind: str, text: str, says: str):
    page = visit()
    open_settings(page)
    page.select_option("#chat [name=structure]", kind)
    page.fill("#chat [name=structure_text]", text)
    expect(page.locator("#chat .verdict.error")).to_contain_text(says)  # during typing
    ask(page, "Where?")
    expect(page.locator(".answer [role=alert]")).to_contain_text(says)
    assert page.input_value("#message") == "Where?"
    assert server.engine.requests == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[a-z]+"),
        ("choice", "yes\nno"),
        ("grammar", 'root ::= "a" root | "b"'),
        ("grammar", 'start: "a"+'),
    ],
)
def test_a_completion_is_bound(visit, server, kind: str, text: str):
    page = visit()
    page.click("#tab-completion")
    open_settings(page, "completion")
    page.select_option("#completion [name=structure]", kind)
    page.fill("#completion [name=structure_text]", text)
    page.wait_for_selector("#completion .verdict:text('Every answer will fit the')")
    page.fill("#prompt", "go")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#output-note:text('tokens')")
    assert server.engine.requests[-1].params.grammar is not None
    page.fill("#completion [name=structure_text]", "(")
    if kind == "regex":
        page.press("#prompt", "Enter")
        page.wait_for_selector("#output-note [role=alert]:text('structured_outputs.regex')")
        assert len(server.engine.requests) == 1


def test_the_seed_is_shown_and_sent(visit, server):
    page = visit()
    for number, question in enumerate(("One?", "Two?"), start=1):
        ask(page, question)
        is_answered(page, number)
        assert f"seed {server.engine.requests[-1].seed}" in page.inner_text(".answer footer >> nth=-1")
    first, second = server.engine.requests
    assert first.seed != second.seed
    open_settings(page)
    page.fill("#chat [name=seed]", "5")
    page.click("button:text('Regenerate')")
    page.wait_for_selector(".answer footer span:text('seed 5')")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.inner_text(".answer footer >> nth=0").endswith(f"seed {first.seed}")


def test_again_sends_the_same_request(visit, server):
    page = visit()
    open_settings(page)
    page.fill("#system", "Be brief.")
    page.fill("#chat [name=top_k]", "7")
    ask(page, "One?")
    is_answered(page, 1)
    page.fill("#system", "Be long.")
    page.fill("#chat [name=top_k]", "")
    ask(page, "Two?")
    is_answered(page, 2)
    first = as_engine_saw(server.engine.requests[0])
    page.click(".again:text('Again') >> nth=0")
    page.wait_for_selector(".repeated:text('the same answer, to the character')")
    assert as_engine_saw(server.engine.requests[-1]) == first
    server.answers(ANSWER.replace("42", "43"))
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    page.click(".again:text('Again') >> nth=0")
    page.wait_for_selector(f".repeated:text('another answer from character {ANSWER.index('42') + 2} on')")
    assert as_engine_saw(server.engine.requests[-1]) == first
    assert page.locator(".repeated code").all_inner_texts()[0].count("42") == 1
    assert "43" in page.locator(".repeated code").all_inner_texts()[1]
    assert page.inner_text(".text pre >> nth=0") == "print('<b>42</b>')"  # the answer stays


def test_again_compares_the_text_of_a_stopped_answer(visit, server):
    server.answers("word " * 700, delay_s=0.02)
    page = visit()
    ask(page, "Talk.")
    expect(page.locator(".text")).to_contain_text("word word")
    page.keyboard.press("Escape")
    page.wait_for_selector(".answer footer span:text('stopped')")
    server.answers("word " * 700)
    page.click(".again:text('Again')")
    page.wait_for_selector(".repeated:text('the same answer, to the character')")
    server.until(lambda: server.engine.num_running == 0)


def test_a_stopped_answer_keeps_its_speed(visit, server):
    server.answers("word " * 700, delay_s=0.02)
    page = visit()
    ask(page, "Talk.")
    expect(page.locator(".text")).to_contain_text("word " * 9)
    page.keyboard.press("Escape")
    page.wait_for_selector(".answer footer span:text('stopped')")
    facts = page.inner_text(".answer footer span")
    assert "tokens, " in facts
    assert "a second, the first after" in facts
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.inner_text(".answer footer span") == facts
    page.click("#tab-completion")
    open_settings(page, "completion")
    page.fill("#completion [name=max_tokens]", "3000")
    server.answers("word " * 700, delay_s=0.02)
    page.fill("#prompt", "go")
    page.press("#prompt", "Enter")
    expect(page.locator("#output")).to_contain_text("word " * 9)
    page.keyboard.press("Escape")
    page.wait_for_selector("#output-note:text('stopped')")
    assert "tokens, " in page.inner_text("#output-note")


def test_two_settings_stand_side_by_side(visit, server):
    page = visit()
    open_settings(page)
    page.fill("#chat [name=temperature]", "0")
    ask(page, "One?")
    is_answered(page, 1)
    first = server.engine.requests[-1]
    page.fill("#chat [name=temperature]", "1.5")
    server.answers("**Other**.")
    page.click("button:text('Compare')")
    page.wait_for_selector(".other[aria-busy=false] footer span:text('tokens')")
    assert page.inner_text(".other .settings-now") == "temperature 1.5 (was 0)"
    assert page.inner_text(".other .text strong") == "Other"
    second = server.engine.requests[-1]
    assert (second.token_ids, second.seed, second.params.temperature) == (first.token_ids, first.seed, 1.5)
    left, right = page.locator(".pair > div >> nth=0").bounding_box(), page.locator(".other").bounding_box()
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]
    assert not page.is_visible("#chat-settings")  # both have room
    assert right["width"] > 400
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.inner_text(".other .settings-now") == "temperature 1.5 (was 0)"
    assert page.inner_text(".other .text strong") == "Other"
    ask(page, "Two?")
    is_answered(page, 2)
    assert server.prompt() == f"<user>One?<assistant>{ANSWER}<user>Two?<assistant>"  # the first answer stays
    open_settings(page)
    left, right = page.locator(".pair > div >> nth=0").bounding_box(), page.locator(".other").bounding_box()
    assert right["y"] >= left["y"] + left["height"]  # below, as a column would be narrow
    page.fill("#chat [name=temperature]", "101")
    page.click("button:text('Compare')")
    page.wait_for_selector(".other [role=alert]:text('temperature is 101')")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.locator(".other").count() == 1  # one that failed is not kept
    page.locator("#chats button").first.click()
    page.click("button:text('Regenerate')")
    is_answered(page, 2)


def test_another_answer_that_is_cut_by_a_reload_is_kept(visit, server):
    page = visit()
    ask(page, "One?")
    is_answered(page, 1)
    server.answers("word " * 700, delay_s=0.02)
    page.click("button:text('Compare')")
    expect(page.locator(".other .text")).to_contain_text("word word")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.inner_text(".other .text").startswith("word word")
    assert "stopped" in page.inner_text(".other footer")
    server.answers("Better.")
    page.click("button:text('Regenerate')")
    page.wait_for_selector(".text p:text('Better.')")
    assert page.locator(".other").count() == 0


def test_keywords_that_cannot_be_kept_are_ignored_at_a_click(visit, server):
    server.answers("7")
    page = visit()
    open_settings(page)
    page.select_option("#chat [name=structure]", "schema")
    page.fill("#chat [name=structure_text]", '{"type": "integer", "not": {}}')
    page.wait_for_selector("#chat .structure .verdict.error")
    page.check("#chat [name=structure_lenient]")
    page.wait_for_selector("#chat .verdict:text('Every answer will fit the schema.')")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Number?")
    assert asked.value.post_data_json["response_format"]["json_schema"]["strict"] is False
    is_answered(page, 1)


def test_a_rate_needs_fifty_milliseconds(visit, server):
    paces = """async () => {
        const { Pace } = await import('./page/api.js');
        const [time, paces] = [performance.now.bind(performance), []];
        for (const wait of [0, 49, 100]) {
            let now = 1000;
            performance.now = () => now;
            const pace = new Pace();
            for (const tokens of [1, 11]) {
                pace.see({ choices: [{}], usage: { completion_tokens: tokens } });
                now += wait;
            }
            paces.push(String(pace));
        }
        performance.now = time;
        return paces;
    }"""
    assert visit().evaluate(paces) == [
        "11 tokens, the first after 0.00 s", "11 tokens, the first after 0.00 s",
        "11 tokens, 100 a second, the first after 0.00 s",
    ]  # fmt: skip
