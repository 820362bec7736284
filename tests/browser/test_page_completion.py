"""The page's playground: completions, probabilities of tokens, and the draft's guesses."""

import math

import pytest
from playwright.sync_api import expect

from tests.support.http.page_browser import MODEL, ask, is_answered, open_settings


def test_completion(visit, server):
    page = visit()
    page.click("#tab-completion")
    open_settings(page, "completion")
    fields = {"temperature": "0", "top_p": "0.5", "top_k": "7", "min_p": "0.25", "max_tokens": "20", "seed": "5"}
    for name, value in fields.items():
        page.fill(f"#completion [name={name}]", value)
    page.click("#completion .more > summary")
    page.fill("#completion [name=stop]", "zz\n\\n\\n")
    page.fill("#prompt", "def f():\n  ")
    page.click("#completion .composer button")
    page.wait_for_selector("#output-note:text('tokens')")
    params = server.engine.requests[-1].params
    assert {name: getattr(params, name) for name in fields} == {name: float(v) for name, v in fields.items()}
    assert params.stop == ("zz", "\n\n")
    assert params.logprobs is None
    assert server.prompt() == "def f():\n  "
    assert page.text_content("#output") == "def f():\n  A **bow**:"
    server.answers("word " * 700, delay_s=0.02)
    page.fill("#completion [name=max_tokens]", "3000")
    page.press("#prompt", "Enter")
    expect(page.locator("#output")).to_contain_text("word word")
    page.keyboard.press("Escape")
    page.wait_for_selector("#output-note:text('stopped')")
    server.until(lambda: server.engine.num_running == 0)
    page.fill("#completion [name=top_p]", "2")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#output-note [role=alert]:text('top_p is 2')")


def test_token_probabilities(visit, server):
    server.answers("a\nb")
    page = visit()
    page.click("#tab-completion")
    open_settings(page, "completion")
    page.check("[name=logprobs]")
    page.fill("#prompt", "go")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".token[tabindex='0']")
    assert page.locator(".token").all_text_contents() == ["a", "↵\n", "b", "<eos>"]
    assert page.evaluate("document.querySelector('.token').style.getPropertyValue('--p')").startswith("0.60")
    page.focus(".token >> nth=0")
    page.keyboard.press("ArrowRight")
    chances = page.locator(".chance").all_inner_texts()
    assert [chance.split()[0] for chance in chances] == ["\\n", "A", "B", "C", "D", "E"]
    assert "60.7 %" in chances[0]
    page.hover(".token >> nth=2")
    assert page.inner_text(".chance >> nth=0").startswith("b")
    token, card = (page.locator(at).bounding_box() for at in (".token >> nth=2", "#alternatives"))
    assert 0 <= card["y"] - token["y"] - token["height"] < 10
    assert abs(card["x"] - token["x"]) < 10
    page.focus("#prompt")
    assert not page.is_visible("#alternatives")


def test_draft_tokens_are_marked(visit, server):
    server.answers("abcd😀")
    server.engine.group, server.engine.num_wrong, server.service.draft = 4, 2, "ngram"
    page = visit()
    assert page.get_attribute("#model", "title") == f"{MODEL}, draft ngram"
    page.click("#tab-completion")
    assert not page.is_visible("#draft-legend")
    page.fill("#prompt", "go")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#output-note:text('9 tokens')")
    assert page.text_content("#output") == "goabcd😀"
    # The character's last byte is a step's own token.
    assert page.locator("#output mark").all_text_contents() == ["abc"]
    assert "6 guesses accepted, 4 rejected" in page.inner_text("#output-note")
    assert page.inner_text("#draft-legend").startswith("Underlined: guessed by the draft (ngram)")
    line = "getComputedStyle(document.querySelector('#output mark')).textDecorationLine"
    assert page.evaluate(line) == "underline"
    open_settings(page, "completion")
    page.check("[name=logprobs]")
    page.fill("[name=max_tokens] >> visible=true", "6")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".token[tabindex='0']")
    assert page.locator("#output .token").all_text_contents()[:4] == ["a", "b", "c", "d"]
    assert page.locator("#output mark").all_text_contents() == ["a", "b", "c"]
    page.click("#tab-chat")
    ask(page, "go")
    is_answered(page, 1)
    assert "6 guesses accepted, 4 rejected" in page.inner_text(".answer footer")


def test_without_a_draft_spans_are_not_requested(visit, server):
    page = visit()
    page.click("#tab-completion")
    page.fill("#prompt", "go")
    with page.expect_request("**/v1/completions") as asked:
        page.press("#prompt", "Enter")
    page.wait_for_selector("#output-note:text('tokens')")
    assert "return_draft_spans" not in asked.value.post_data_json
    assert not page.is_visible("#draft-legend")
    assert "guesses" not in page.inner_text("#output-note")


def test_characters_of_several_tokens_are_shown_whole(visit, server):
    server.answers("a 😀é\xff"[:-1])
    server.engine.script.insert(-1, 0xF0)  # a character that never ends
    page = visit()
    page.click("#tab-completion")
    open_settings(page, "completion")
    page.check("[name=logprobs]")
    page.fill("#prompt", "go")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".token[tabindex='0']")
    assert page.locator(".token").all_text_contents() == ["a", " ", "😀", "é", "�", "<eos>"]
    chance = "n => Number(document.querySelectorAll('.token')[n].style.getPropertyValue('--p'))"
    assert page.evaluate(chance, 2) == pytest.approx(math.exp(-0.5 * 4), rel=1e-3)
    page.hover(".token >> nth=2")
    assert page.inner_text("#alternatives").startswith("One character of 4 tokens; the first of them:")
    assert page.inner_text(".chance code >> nth=0") == "part of a character (F0)"
    assert "bytes:" not in page.inner_text("#completion")
