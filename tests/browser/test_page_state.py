"""The page and its server's state: the dot, recommended values, killing a process; and chats as files."""

import json

import pytest
from playwright.sync_api import expect

from actors.wire.adapter_entry import AdapterEntry, AdapterState
from runtime.text.sampling_defaults import SamplingDefaults
from serve_app.settings import HttpSettings
from tests.support.http.page_browser import ANSWER, Server, ask, is_answered, open_settings


@pytest.fixture(scope="module")
def served():
    server = Server(HttpSettings(allow_chaos=True))
    yield server
    server.close()


@pytest.mark.rotated
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


@pytest.fixture
def named(server):
    """The server with a second name of its model, and an adapter."""
    server.service._aliases = ("gpt-x",)
    server.engine.adapters.states["poet"] = AdapterState(AdapterEntry("poet", "/adapters/poet", 1), "digest")
    yield server
    server.service._aliases = ()
    server.engine.adapters.states.clear()


def test_any_model_or_adapter_can_be_chosen(visit, named):
    page = visit()
    options = page.locator("#models option")
    assert options.all_text_contents() == ["tiny-model", "gpt-x", "poet (adapter)"]
    assert not page.is_visible("#model")
    page.select_option("#models", "poet")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Hello?")
    assert asked.value.post_data_json["model"] == "poet"
    is_answered(page, 1)
    page.select_option("#models", "gpt-x")
    page.click("button:text('Compare')")
    expect(page.locator(".other .settings-now")).to_have_text('model "gpt-x" (was "poet")')
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.input_value("#models") == "gpt-x"
    page.click("#tab-completion")
    page.fill("#prompt", "go")
    with page.expect_request("**/v1/completions") as asked:
        page.press("#prompt", "Enter")
    assert asked.value.post_data_json["model"] == "gpt-x"
    page.wait_for_selector("#output-note:text('tokens')")


def test_the_dot_is_of_the_chosen_model(visit, named):
    sleeping = {"status": "ready", "phase": "b: asleep.", "phases": {"b": "asleep; the next request starts an engine"}}
    page = visit()
    page.route("**/ready", lambda route: route.fulfill(json=sleeping))
    page.evaluate("dispatchEvent(new Event('online'))")
    page.wait_for_selector("#server[data-state=ready]")
    sleeping["phases"] = {"library/tiny-model": "asleep; the next request starts an engine"}
    page.evaluate("dispatchEvent(new Event('online'))")
    page.wait_for_selector("#server[data-state=waiting]")
    assert page.inner_text("#model") == "asleep"


def test_a_model_that_has_gone_is_not_chosen(visit, named):
    page = visit()
    page.select_option("#models", "poet")
    named.engine.adapters.states.clear()
    page.evaluate("dispatchEvent(new Event('focus'))")
    expect(page.locator("#models option")).to_have_count(2)
    assert page.input_value("#models") == "library/tiny-model"
    named.service._aliases = ()
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.inner_text("#model") == "tiny-model"
    assert not page.is_visible("#models")


def test_settings_that_are_on_have_chips(visit, server):
    page = visit()
    chips = page.locator("#chat .chips li")
    assert chips.count() == 0
    open_settings(page)
    page.fill("#system", "Be brief.")
    page.fill("#chat [name=temperature]", "1")
    page.fill("#chat [name=max_tokens]", "60")
    page.select_option("#chat [name=structure]", "schema")
    assert chips.count() == 3  # nothing is bound yet
    page.fill("#chat [name=structure_text]", "{}")
    page.click("#chat .more > summary")
    page.fill("#chat [name=stop]", "<b>\n" + "z" * 100)
    page.check("#chat [name=ignore_eos]")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    labels = ["system prompt", "temperature 1", "60 tokens", "JSON Schema", f"stop <b> {'z' * 19}…", "no end token"]
    assert chips.all_inner_texts() == [f"{label}×" for label in labels]
    for label in labels[1:]:
        page.click(f"#chat .chips [aria-label='Remove {label}']")
    assert chips.all_inner_texts() == ["system prompt×"]
    ask(page, "Hello")
    is_answered(page, 1)
    params = server.engine.requests[-1].params
    assert (params.grammar, params.stop, params.ignore_eos) == (None, (), False)
    assert server.prompt() == "<system>Be brief.<user>Hello<assistant>"
    page.click("#chat .chips button")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert chips.count() == 0
    assert page.locator("#completion .chips li").all_text_contents() == ["64 tokens×"]


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
    server.answers("word " * 700, delay_s=0.02)
    page = visit()
    assert not page.is_visible("#chat .kill")  # it works on a running answer
    ask(page, "Talk.")
    page.wait_for_selector("#chat .kill")
    page.keyboard.press("Escape")
    page.wait_for_selector("#chat .kill", state="hidden")

    def without(route):
        route.fulfill(json={**route.fetch().json(), "allow_chaos": False})

    page.context.route("**/server_info", without)
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    ask(page, "Talk.")
    expect(page.locator(".text >> nth=1")).to_contain_text("word word")
    assert not page.is_visible("#chat .kill")
    page.keyboard.press("Escape")
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
    page.click("#chats .title:text('One?')")
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
    turn = {"question": "Four?", "text": "4", "request": {}, "calls": [{"id": 1}], "other": {"text": "x"}}
    hostile = {"format": "callboard-chats", "chats": [{"turns": [turn], "title": {}, "at": "x"}]}
    (tmp_path / "hostile.json").write_text(json.dumps(hostile))
    num_chats = page.locator("#chats .title").count()  # the note is the same as before
    page.set_input_files("#import", tmp_path / "hostile.json")
    page.wait_for_selector(f"#chats .title >> nth={num_chats}")
    assert set(kept()[0]["turns"][0]) == {"question", "text", "reasoning", "end"}
    assert set(kept()[0]) == {"id", "turns"}
    (tmp_path / "other.json").write_text('{"format": "other"}')
    page.set_input_files("#import", tmp_path / "other.json")
    page.wait_for_selector("#chats-note.error:text('The file has no chats of this page')")
    assert len(kept()) == 4
