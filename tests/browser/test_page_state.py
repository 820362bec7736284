"""The page and its server's state: the dot, recommended values, killing a process; and chats as files."""

import json

import pytest
from playwright.sync_api import expect

from runtime.text.sampling_defaults import SamplingDefaults
from serve_app.settings import HttpSettings
from tests.support.http.page_browser import ANSWER, Server, ask, is_answered, open_settings


@pytest.fixture(scope="module")
def served():
    server = Server(HttpSettings(allow_chaos=True))
    yield server
    server.close()


def test_the_dot_follows_the_server(visit, server):
    page = visit()
    dot = "getComputedStyle(document.getElementById('server'), '::before').backgroundColor"
    colours = {"ready": page.evaluate(dot)}
    page.context.route("**/*", lambda route: route.abort())
    ask(page, "Hello?")
    page.wait_for_selector("[role=alert]:text('cannot be reached')")
    page.wait_for_selector("#server[data-state=down]")  # at once, not at the next poll
    colours["down"] = page.evaluate(dot)
    assert page.inner_text("#model") == "Not reachable"
    assert "cannot be reached" in page.inner_text("#trouble")
    page.context.unroute("**/*")
    page.wait_for_selector("#server[data-state=ready]")  # by itself
    assert page.inner_text("#model") == "tiny-model"
    assert not page.is_visible("#trouble")
    server.engine.reason = "The engine is restarting."
    page.wait_for_selector("#server[data-state=waiting]")
    colours["waiting"] = page.evaluate(dot)
    assert page.inner_text("#trouble") == "The engine is restarting."
    server.engine.reason = None
    page.wait_for_selector("#server[data-state=ready]")
    server.engine.sleep_level = 1
    page.wait_for_selector("#server[data-state=waiting]")
    assert page.inner_text("#model") == "tiny-model, asleep"
    assert not page.is_visible("#trouble")
    server.engine.sleep_level = 0
    page.wait_for_selector("#server[data-state=ready]")
    assert len(set(colours.values())) == 3


def test_recommended_values_are_placeholders(visit, server):
    server.service._defaults = SamplingDefaults({"temperature": 0.2, "top_p": 0.9}, "a.json")
    try:
        page = visit()
        open_settings(page)
        shown = {
            name: page.get_attribute(f"#chat [name={name}]", "placeholder")
            for name in ("temperature", "top_p", "top_k")
        }
        assert shown == {"temperature": "0.2", "top_p": "0.9", "top_k": "Off"}
        assert page.input_value("#chat [name=temperature]") == ""
        ask(page, "Hello")
        is_answered(page, 1)
        assert server.engine.requests[-1].params.temperature == 0.2
    finally:
        server.service._defaults = SamplingDefaults()
    page = visit()
    open_settings(page)
    assert page.get_attribute("#chat [name=temperature]", "placeholder") == "1"
    page.click("#tab-completion")
    open_settings(page, "completion")
    assert page.get_attribute("#completion [name=max_tokens]", "placeholder") == "16"


def test_more_settings_open_in_view(visit, server):
    page = visit()
    open_settings(page)
    page.click("#chat .more > summary")
    box = page.locator("#chat [name=ignore_eos]")
    expect(box).to_be_in_viewport(ratio=1)
    page.click("#chat-settings .close")
    stage = page.locator("#chat .stage").bounding_box()
    assert stage["x"] + stage["width"] == 1280  # settings take no room for good
    chats = page.locator("#chats-panel").bounding_box()
    assert chats["x"] == 0
    assert chats["width"] < 260


def test_a_process_is_killed_at_a_click(visit, server):
    server.answers("word " * 700, delay_s=0.02)
    page = visit()
    ask(page, "Talk.")
    expect(page.locator(".text")).to_contain_text("word word")
    page.click("#chat .kill")
    page.wait_for_selector(".repeated:text('The engine was killed; the answer went on after a pause of')")
    assert server.killed == ["engine"]
    page.keyboard.press("Escape")
    page.click("#tab-engine")
    page.click("#engine .kill:text('Kill a runner')")
    page.wait_for_selector("#killed:text('Killed a runner of engine a, process 7.')")
    assert server.killed == ["engine", "runner"]


def test_kill_is_hidden_unless_allowed(visit, server):
    page = visit()
    assert page.is_visible("#chat .kill")

    def without(route):
        route.fulfill(json={**route.fetch().json(), "allow_chaos": False})

    page.context.route("**/server_info", without)
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert not page.is_visible("#chat .kill")
    page.click("#tab-engine")
    assert not page.is_visible("#engine .kill")


HARD_QUESTION = "One?\n\n<!-- callboard: answer -->\n\\<!-- callboard: x -->\n## You\n"


def test_chats_are_exported_and_imported(visit, server, tmp_path):
    page = visit()
    ask(page, HARD_QUESTION)
    is_answered(page, 1)
    ask(page, "Two?")
    is_answered(page, 2)
    page.click("#chats-panel .new-chat")
    assert not page.is_visible("#export-markdown")  # this chat is empty
    server.answers("Third.")
    ask(page, "Three?")
    is_answered(page, 1)

    def kept():
        return json.loads(page.evaluate("localStorage.getItem('callboard-chats')"))

    def export(button: str, name: str):
        with page.expect_download() as download:
            page.click(button)
        download.value.save_as(tmp_path / name)
        return tmp_path / name

    before = kept()
    everything = export("#export-json", "all.json")
    assert json.loads(everything.read_text())["chats"] == before
    page.click("#chats button:text('One?')")
    one = export("#export-markdown", "one.md")
    assert "## You\n\nTwo?" in one.read_text()
    assert f"## Answer\n\n{ANSWER}\n" in one.read_text()
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#forget")
    page.set_input_files("#import", everything)
    page.wait_for_selector("#chats-note:text('2 chats imported.')")
    assert [chat["turns"] for chat in kept()] == [chat["turns"] for chat in before]
    assert page.inner_text(".text") == "Third."
    page.set_input_files("#import", one)
    page.wait_for_selector("#chats-note:text('1 chat imported.')")
    assert kept()[0]["turns"] == before[1]["turns"]
    page.click(".again:text('Again') >> nth=0")  # an imported answer can be regenerated
    page.wait_for_selector(".repeated:text('Asked again:')")
    (tmp_path / "other.json").write_text('{"format": "other"}')
    page.set_input_files("#import", tmp_path / "other.json")
    page.wait_for_selector("#chats-note.error:text('The file has no chats of this page')")
    assert len(kept()) == 3


def test_charts_fill_their_width_from_one_base_line(visit, server):
    page = visit()
    page.click("#tab-engine")
    page.wait_for_selector("#generated dd:text('tokens a second')")
    expect(page.locator("#running polyline[points]")).to_have_count(1)
    points = [pair.split(",") for pair in page.get_attribute("#running polyline", "points").split()]
    assert [float(points[0][0]), float(points[-1][0])] == [0, 1]
    boxes = [page.locator(f"#{name} svg").bounding_box() for name in ("running", "waiting", "kv", "prefix")]
    assert len({box["y"] + box["height"] for box in boxes}) == 1
    cards = [page.locator(f"#{name}").bounding_box() for name in ("running", "waiting", "kv", "prefix")]
    for box, card in zip(boxes, cards, strict=True):
        assert 10 < card["x"] + card["width"] - box["x"] - box["width"] < 30
