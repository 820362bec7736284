"""The page's chat: sending, stopping, editing, and the state that survives a reload."""

import json
import re

import pytest
from playwright.sync_api import expect

from runtime.base.types import FinishReason
from tests.support.http.page_browser import ANSWER, ask, is_answered, open_settings


def test_several_turns_with_settings(visit, server):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    assert page.inner_text("#model") == "tiny-model"
    open_settings(page)
    page.fill("#system", "Be brief.")
    page.fill("#chat [name=temperature]", "0.25")
    page.fill("#chat [name=top_p]", "0.5")
    page.fill("#chat [name=max_tokens]", "500")
    page.fill("#chat [name=seed]", "7")
    ask(page, "What is a rainbow?")
    is_answered(page, 1)
    assert server.prompt() == "<system>Be brief.<user>What is a rainbow?<assistant>"
    request = server.engine.requests[-1]
    params = request.params
    assert (params.temperature, params.top_p, params.max_tokens, request.seed) == (0.25, 0.5, 500, 7)
    # Markup of the model stays text; its code and bold words are formatted.
    assert page.inner_text(".text pre") == "print('<b>42</b>')"
    assert page.inner_text("figcaption span") == "python"
    assert page.inner_text(".text strong") == "bow"
    assert page.inner_text(".text > div:last-child p") == "with n = 1.33 & <i>you</i>."
    assert f"{len(ANSWER.encode()) + 1} tokens" in page.inner_text(".answer footer")
    page.click(".answer footer button:text('Copy')")
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER

    server.answers("Red.")
    page.click("#chat-settings .close")  # closed settings count too
    ask(page, "Which colour is outside?")
    is_answered(page, 2)
    said = f"<user>What is a rainbow?<assistant>{ANSWER}<user>Which colour is outside?<assistant>"
    assert server.prompt() == "<system>Be brief." + said
    page.click("#chats-panel .new-chat")
    assert page.inner_text("#turns") == ""
    page.click(".suggestion >> nth=0")
    is_answered(page, 1)
    assert server.prompt() == "<system>Be brief.<user>Explain how a rainbow forms.<assistant>"


@pytest.mark.parametrize("how", ["button", "escape", "new chat"])
def test_stop(visit, server, how: str):
    server.answers("word " * 700, delay_s=0.02)
    page = visit()
    ask(page, "Talk.")
    expect(page.locator(".text")).to_contain_text("word word")  # before the end
    assert page.inner_text("#chat .composer button") == "Stop"
    if how == "escape":
        page.keyboard.press("Escape")
    else:
        page.click("#chat .composer button" if how == "button" else "#chats-panel .new-chat")
    server.until(lambda: len(server.engine.aborted) == 1)
    page.wait_for_selector("#chat .composer button:text('Send')")
    server.answers("Yes.")
    if how == "new chat":
        ask(page, "Again?")
        is_answered(page, 1)
        assert server.prompt() == "<user>Again?<assistant>"
    else:
        assert "stopped" in page.inner_text(".answer footer")
        ask(page, "Again?")
        is_answered(page, 2)
        assert re.fullmatch(r"<user>Talk\.<assistant>(word ?)+(w|wo|wor)?<user>Again\?<assistant>", server.prompt())


def test_errors_are_shown_and_the_question_kept(visit, server):
    page = visit()
    open_settings(page)
    page.fill("#chat [name=temperature]", "101")
    ask(page, "Hello")
    page.wait_for_selector("[role=alert]:text('temperature is 101')")
    assert page.input_value("#message") == "Hello"
    page.fill("#chat [name=temperature]", "")
    server.engine.busy = True
    page.press("#message", "Enter")
    page.wait_for_selector("[role=alert]:text('queue is full')")
    server.engine.busy = False
    server.engine.fails_after = 6
    page.press("#message", "Enter")
    page.wait_for_selector("[role=alert]:text('no finite logits')")  # after the stream had begun
    assert page.inner_text(".text") == "A **bo"
    server.engine.fails_after = None
    assert page.locator("[role=alert]").count() == 1  # a failed turn makes room for the next
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Hello?")
    page.wait_for_selector("[role=alert]:text('cannot be reached')")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body='data: {"choices":[]}\n\n'))
    ask(page, "Hello?")
    page.wait_for_selector("[role=alert]:text('without its end mark')")


def test_reasoning_is_folded(visit):
    deltas = ['{"reasoning_content":"Hm, <b>"}', '{"reasoning_content":"so."}', '{"content":"Yes"}']
    chunks = "".join(f'data: {{"choices":[{{"index":0,"delta":{delta}}}]}}\r\n\r\n' for delta in deltas)
    page = visit()
    answer = f": waiting\n\n{chunks}data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=answer))
    ask(page, "Why?")
    is_answered(page, 1)
    assert page.inner_text(".text") == "Yes"
    assert not page.is_visible(".answer details p")
    page.click(".answer summary")
    assert page.inner_text(".answer details p") == "Hm, <b>so."


def test_chats_and_settings_survive_a_reload(visit, server):
    page = visit()
    open_settings(page)
    page.fill("#system", "Be brief.")
    page.fill("#chat [name=top_k]", "7")
    page.click("#chat .more > summary")
    page.check("#chat [name=ignore_eos]")
    page.uncheck("#chat [name=ignore_eos]")
    ask(page, "One?")
    is_answered(page, 1)
    page.click("#chats-panel .new-chat")
    server.answers("Second.")
    ask(page, "Two?")
    is_answered(page, 1)
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.inner_text(".question") == "Two?"
    assert page.inner_text(".text") == "Second."
    assert page.input_value("#system") == "Be brief."
    assert page.input_value("#chat [name=top_k]") == "7"
    assert page.locator("#chats .title").all_inner_texts() == ["Two?", "One?"]
    page.click("#chats .title:text('One?')")
    assert page.inner_text(".text strong") == "bow"
    ask(page, "More?")
    is_answered(page, 2)
    assert server.prompt() == f"<system>Be brief.<user>One?<assistant>{ANSWER}<user>More?<assistant>"
    page.click("[aria-label='Delete “Two?”']")
    assert page.locator("#chats .title").all_inner_texts() == ["One?"]
    open_settings(page)
    page.click("#chat .reset")
    assert page.input_value("#system") == ""
    assert page.input_value("#chat [name=temperature]") == ""


OLD = [  # as earlier versions of the page stored them
    {"id": "a", "turns": [{"question": "Cats?\nAnd dogs?", "text": "**Meow**", "reasoning": "", "end": ""}]},
    {
        "id": "b",
        "turns": [
            {"question": "Stars?", "text": "Many", "reasoning": "Hm", "end": "stopped", "pace": "2 tokens",
             "request": {"model": "m", "system": "", "fields": {"seed": 5}, "prefix": ""}},
        ],
    },
]  # fmt: skip


def test_old_chats_open_and_can_be_named_and_found(visit, server):
    page = visit()
    page.evaluate("chats => localStorage.setItem('callboard-chats', JSON.stringify(chats))", OLD)
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    titles = page.locator("#chats .title")
    assert titles.all_inner_texts() == ["Cats?", "Stars?"]
    assert page.locator("#chats time").count() == 0
    page.click("#chats .title:text('Stars?')")
    assert page.inner_text(".answer footer span") == "2 tokens, stopped, seed 5"
    page.hover("#chats li >> nth=1")
    page.click("[aria-label='Rename “Cats?”']")
    page.keyboard.type("<b>Pets</b> " + "long " * 20)
    page.keyboard.press("Enter")
    assert titles.all_inner_texts()[1].startswith("<b>Pets</b> long")
    page.click("[aria-label='Rename “Stars?”']")
    page.keyboard.type("Sky")
    page.keyboard.press("Escape")
    assert titles.all_inner_texts()[0] == "Stars?"
    page.click("[aria-label='Rename “Stars?”']")
    page.keyboard.type("Sky")
    page.keyboard.press("Enter")
    ask(page, "More?")  # the open chat keeps its new name, and has a date now
    is_answered(page, 2)
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert titles.all_inner_texts()[0] == "Sky"
    assert page.locator("#chats time").count() == 1
    for wanted, found in (("MEOW", "<b>Pets</b>"), ("sky", "Sky"), ("more?", "Sky")):
        page.fill("#search", wanted)
        assert titles.count() == 1
        assert titles.inner_text().startswith(found)
    page.fill("#search", "nothing of that")
    assert titles.count() == 0
    page.fill("#search", "")
    assert titles.count() == 2


def test_everything_is_forgotten_at_a_click(visit, server):
    page = visit()
    open_settings(page)
    page.fill("#chat [name=top_k]", "7")
    ask(page, "One?")
    is_answered(page, 1)
    for agreed, num_kept in ((False, 1), (True, 0)):
        page.once("dialog", lambda dialog, agreed=agreed: dialog.accept() if agreed else dialog.dismiss())
        page.click("#forget")
        assert page.locator("#chats li").count() == num_kept
    assert page.inner_text("#turns") == ""
    assert page.is_visible("#welcome")
    assert page.input_value("#chat [name=top_k]") == ""
    assert "One?" not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.is_visible("#welcome")


def test_broken_browser_storage_is_ignored(visit, server):
    page = visit()
    page.evaluate("localStorage.setItem('callboard-chats', 'no JSON')")
    page.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    ask(page, "One?")
    is_answered(page, 1)
    ask(page, "Two?")
    is_answered(page, 2)


def test_full_storage_drops_the_oldest_chats(visit, server):
    page = visit()
    page.add_init_script("""
        const setItem = Storage.prototype.setItem;
        Storage.prototype.setItem = function (key, text) {
            if (text.length > 5100) throw new DOMException('full', 'QuotaExceededError');
            setItem.call(this, key, text);
        };
    """)
    turns = [{"question": f"Old {i}", "text": "x" * 1000, "reasoning": "", "end": ""} for i in range(4)]
    old = [{"id": str(i), "turns": [turn]} for i, turn in enumerate(turns)]
    page.evaluate("chats => localStorage.setItem('callboard-chats', JSON.stringify(chats))", old)
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    server.answers("y" * 1500)
    ask(page, "New")
    is_answered(page, 1)
    kept = json.loads(page.evaluate("localStorage.getItem('callboard-chats')"))
    assert [chat["turns"][0]["question"] for chat in kept] == ["New", "Old 0", "Old 1", "Old 2"]


def test_a_question_without_an_answer_is_not_kept(visit, server):
    page = visit()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Hello?")
    page.wait_for_selector("[role=alert]:text('cannot be reached')")
    assert page.locator("#chats li").count() == 0
    assert page.input_value("#message") == "Hello?"
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    assert page.is_visible("#welcome")


def test_an_answer_cut_by_a_reload_can_be_continued(visit, server):
    server.answers("word " * 700, delay_s=0.02)
    page = visit()
    ask(page, "Talk.")
    expect(page.locator(".text")).to_contain_text("word word")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    text = page.evaluate("JSON.parse(localStorage.getItem('callboard-chats'))[0].turns[0].text")
    assert text.startswith("word word")
    assert "stopped" in page.inner_text(".answer footer")
    server.answers(" and more.")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("button:text('Continue')")
    page.wait_for_selector(".text p:text('and more.')")
    body = asked.value.post_data_json
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert server.prompt() == f"<user>Talk.<assistant>{text.rstrip()}"
    is_answered(page, 1)
    assert page.locator("button:text('Continue')").count() == 0  # it ended by itself


def test_an_answer_cut_at_the_limit_can_be_continued(visit, server):
    server.answers("abcdef")
    page = visit()
    open_settings(page)
    page.fill("#chat [name=max_tokens]", "3")
    ask(page, "Letters?")
    page.wait_for_selector(".answer footer span:text('cut at the token limit')")
    assert page.inner_text(".text") == "abc"
    server.answers("def")
    page.fill("#chat [name=max_tokens]", "")
    page.click("button:text('Continue')")
    page.wait_for_selector(".text p:text('abcdef')")
    is_answered(page, 1)
    ask(page, "And?")
    is_answered(page, 2)
    assert server.prompt() == "<user>Letters?<assistant>abcdef<user>And?<assistant>"


def test_an_answer_that_the_server_ended_can_be_continued(visit, server, monkeypatch):
    server.answers("abcdef")
    monkeypatch.setattr(server.engine, "failure", (FinishReason.ABORT, ""))
    monkeypatch.setattr(server.engine, "fails_after", 3)
    page = visit()
    ask(page, "Letters?")
    page.wait_for_selector(".answer footer span:text('ended by the server')")
    assert page.inner_text(".text") == "abc"
    assert page.locator("button:text('Continue')").count() == 1


def test_regenerate(visit, server):
    page = visit()
    ask(page, "One?")
    is_answered(page, 1)
    ask(page, "Two?")
    is_answered(page, 2)
    assert page.locator("button:text('Regenerate')").count() == 1  # of the last answer
    server.answers("Better.")
    page.click("button:text('Regenerate')")
    page.wait_for_selector(".text p:text('Better.')")
    is_answered(page, 2)
    assert server.prompt() == f"<user>One?<assistant>{ANSWER}<user>Two?<assistant>"
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.click("button:text('Regenerate')")
    page.wait_for_selector("[role=alert]:text('cannot be reached')")
    assert page.inner_text(".text >> nth=1") == "Better."  # the old answer stays if no new one comes


def test_edit(visit, server):
    page = visit()
    for question in ("One?", "Two?", "Three?"):
        ask(page, question)
        page.wait_for_selector(f".question:text('{question}')")
        page.wait_for_selector("#chat .composer button:text('Send')")
    page.hover(".question >> nth=1")
    page.click(".asked button >> nth=1")
    assert page.input_value(".editor textarea") == "Two?"
    page.keyboard.press("Escape")
    assert page.locator(".question").all_inner_texts() == ["One?", "Two?", "Three?"]
    page.hover(".question >> nth=1")
    page.click(".asked button >> nth=1")
    server.answers("New.")
    page.keyboard.press("Control+A")
    page.keyboard.type("Zwei?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".text p:text('New.')")
    assert page.locator(".question").all_inner_texts() == ["One?", "Zwei?"]
    assert server.prompt() == f"<user>One?<assistant>{ANSWER}<user>Zwei?<assistant>"


def test_every_setting_reaches_the_engine(visit, server):
    page = visit()
    open_settings(page)
    page.click("#chat .more > summary")
    values = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "max_tokens": 50, "repetition_penalty": 1.5,
        "presence_penalty": -1, "frequency_penalty": 0.5, "min_tokens": 2,
    }  # fmt: skip
    for name, value in values.items():
        page.fill(f"#chat [name={name}]", str(value))
    page.fill("#chat [name=seed]", "5")
    page.fill("#chat [name=stop]", "zz\n\\n\\n")
    page.fill("#chat [name=logit_bias]", "65 -2.5\n66: 1")
    page.check("#chat [name=ignore_eos]")
    ask(page, "Go.")
    is_answered(page, 1)
    request = server.engine.requests[-1]
    assert {name: getattr(request.params, name) for name in values} == values
    assert request.seed == 5
    assert request.params.stop == ("zz", "\n\n")
    assert request.params.logit_bias == ((65, -2.5), (66, 1.0))
    assert request.params.ignore_eos
    page.fill("#chat [name=logit_bias]", "65 much")
    ask(page, "Go.")
    page.wait_for_selector("[role=alert]:text('65 much')")
