"""The page as a whole: keys, a server that starts, the keyboard alone, a phone, contrast."""

import pytest

from tests.support.http.page_browser import ANSWER, ask, is_answered, open_settings


def test_the_page_requests_and_sends_the_key(visit, server):
    def guard(route):
        if route.request.headers.get("authorization") == "Bearer secret":
            route.fallback()
        else:
            route.fulfill(status=401, json={"error": {"message": "Wrong key."}})

    page = visit()
    page.context.route("**/v1/**", guard)
    page.reload()
    page.wait_for_selector("#key-field:focus")
    assert page.inner_text("#key label") == "The server asks for an API key."
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key label:text('did not accept')")
    ask(page, "Hello")
    page.wait_for_selector(".error:text('did not accept')")
    page.fill("#key-field", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key", state="hidden")
    ask(page, "Hello")
    is_answered(page, 1)
    assert page.evaluate("sessionStorage.length") == 1
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_the_page_waits_for_a_starting_server(visit, server):
    page = visit()
    loading = {"error": {"message": "The model is loading."}}
    page.route("**/v1/models", lambda route: route.fulfill(status=503, json=loading), times=1)
    page.reload()
    page.wait_for_selector("#trouble:text('The model is loading.')")
    page.wait_for_selector("#server[data-state=ready]")
    assert not page.is_visible("#trouble")


def test_keyboard_alone(visit, server):
    page = visit()
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    is_answered(page, 1)
    assert server.prompt() == "<user>one\ntwo<assistant>"
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "tab":
            break
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.id") == "tab-engine"
    page.keyboard.press("ArrowLeft")
    assert page.is_visible("#completion")
    seen = []
    for _ in range(7):  # the setting that is on has a button as well
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
        assert page.evaluate(outline) == "solid" or seen[-1] == "prompt"  # its box has the ring
    assert seen[-6:] == ["×", "prompt", "Run", "curl", "Python", "Settings"]
    page.keyboard.press("Enter")
    seen.clear()
    for _ in range(11):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.name || document.activeElement.innerText"))
        assert page.evaluate(outline) == "solid"
    assert seen == [
        "Close", "logprobs", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "structure", "More",
        "Back to the defaults",
    ]  # fmt: skip
    page.focus("#completion [name=seed]")
    assert page.evaluate("document.activeElement.labels[0].innerText.trim()") == "Seed"
    page.keyboard.press("Escape")
    assert not page.is_visible("#completion-settings")
    assert page.evaluate("document.activeElement.innerText") == "Settings"


def test_phone(visit, server):
    server.answers("x" * 300 + " " + ANSWER.replace("42", "4" * 200))
    page = visit(360, 640, has_touch=True, is_mobile=True)
    for view in ("chat", "completion", "engine"):
        page.click(f"#tab-{view}")
        if view == "chat":
            ask(page, "y" * 300)
            is_answered(page, 1)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        if view != "engine":
            label = f"getComputedStyle(document.querySelector('#{view} .menu'), '::before').content"
            assert page.evaluate(label) == '"Copy as"'
            button = page.locator(f"#{view} .composer button").bounding_box()
            assert button["y"] + button["height"] <= 640
            assert not page.is_visible(f"#{view} [name=seed]")
            open_settings(page, view)
            box = page.locator(f"#{view}-settings").bounding_box()
            assert (box["x"], box["y"], box["width"], box["height"]) == (0, 0, 360, 640)
            page.click(f"#{view} .more > summary")
            page.locator(f"#{view} .reset").evaluate("button => button.scrollIntoView(false)")  # the sheet scrolls
            box = page.locator(f"#{view} .reset").bounding_box()
            assert box["x"] + box["width"] <= 360
            assert box["y"] + box["height"] < 641
            page.click(f"#{view}-settings .close")
            assert not page.is_visible(f"#{view}-settings")
    page.click("#tab-chat")
    page.click("#chat .narrow:text('Chats')")
    page.click("#chats .title:text('yyy')")
    assert not page.is_visible("#chats-panel")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast(visit, scheme: str):
    page = visit(color_scheme=scheme, reduced_motion="reduce")
    colours = page.evaluate("""() => {
        const probe = document.body.appendChild(document.createElement('i'));
        return Object.fromEntries(['ground', 'raised', 'sunken', 'wash', 'bad-wash', 'text', 'muted', 'accent',
            'on-accent', 'bad', 'edge'].map(name => {
            probe.style.color = `var(--${name})`;
            return [name, getComputedStyle(probe).color.match(/[0-9]+/g).map(Number)];
        }));
    }""")
    assert (sum(colours["ground"]) > 600) == (scheme == "light")
    pairs = [(t, g) for t in ("text", "muted", "accent") for g in ("ground", "raised", "sunken", "wash")]
    for text, ground in [*pairs, ("on-accent", "accent"), ("bad", "bad-wash")]:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["edge"], colours["ground"]) >= 3
    assert page.evaluate("document.getAnimations().length") == 0


def contrast(one: list[int], other: list[int]) -> float:
    """WCAG 2's contrast ratio of two sRGB colours."""

    def luminance(colour: list[int]) -> float:
        linear = [c / 12.92 if (c := v / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for v in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
