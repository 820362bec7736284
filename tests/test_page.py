"""The page at GET /: what is served, and what a person does with it in headless Chromium against a scripted engine."""

import re
import shutil
import threading
import time
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import uvicorn
from fake_engine import FakeEngine, byte_tokenizer, client_of
from playwright.sync_api import expect, sync_playwright
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from serve_app.http import build_http_app
from serve_app.service import Service

FOLDER = Path(__file__).parents[1] / "serve_app" / "page"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py")
MODEL = "library/tiny-model"

# ---- what is served --------------------------------------------------------------------------------------------------


async def test_the_page_needs_no_engine():
    async with client_of(FakeEngine(reason="The engine is loading.")) as client:
        response = await client.get("/")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert response.text == (FOLDER / "index.html").read_text()
        assert (await client.head("/")).headers["content-length"] == str(len(response.content))
        assert (await client.get("/page/nothing.js")).json()["error"]["code"] == "not_found"
        assert (await client.get("/page/__init__.py")).status_code == 404


@pytest.mark.parametrize("name", FILES)
async def test_files_are_typed_guarded_and_kept_by_the_browser(name: str):
    types = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    path = "/" if name == "index.html" else f"/page/{name}"
    async with client_of(FakeEngine()) as client:
        response = await client.get(path)
        assert response.content == (FOLDER / name).read_bytes()
        assert response.headers["content-type"] == types.get(name.split(".")[1], "text/javascript; charset=utf-8")
        assert response.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        etag = response.headers["etag"]
        for known, status in [(etag, 304), (f'"old", W/{etag}', 304), ('"old"', 200)]:
            again = await client.get(path, headers={"if-none-match": known})
            assert (again.status_code, again.headers["etag"], bool(again.content)) == (status, etag, status == 200)


def test_a_wheel_carries_every_file():
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["serve_app.page"]
    assert [name for name in FILES if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_files_name_no_other_host():
    namespace = "http://www.w3.org/2000/svg"
    text = "".join((FOLDER / name).read_text() for name in FILES).replace(namespace, "")
    assert re.findall(r"https?:|//[a-z]+\.|innerHTML|insertAdjacentHTML|document\.write", text) == []


# ---- in a browser ----------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_browser = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; `apt-get install chromium` brings one"),
]
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
ANSWER = "A **bow**:\n\n```python\nprint('<b>42</b>')\n```\nwith `n = 1.33` & <i>you</i>."
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="a {{b}} c",engine="0"}} 3
vllm:num_requests_running{{model_name="a {{b}} c",engine="1"}} 2.0
vllm:num_requests_waiting{{engine="0"}} 7
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:kv_cache_usage_perc{{engine="1"}} 0.625
vllm:generation_tokens_total{{engine="0"}} {generated}
vllm:prompt_tokens_total{{engine="0"}} 1e3
vllm:time_to_first_token_seconds_sum{{engine="0"}} {ttft_sum}
vllm:time_to_first_token_seconds_count{{engine="0"}} {count}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1"}} 1
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.5"}} {count}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {count}
"""


class Server:
    """The HTTP front over a scripted engine, on a thread of its own, with a /metrics of the test's making."""

    def __init__(self) -> None:
        self.engine = FakeEngine(ANSWER, group=3, delay_s=0.002, max_model_len=4096)
        self.metrics_at: list[float] = []
        self.service = Service(self.engine, byte_tokenizer(), MODEL)
        app = build_http_app(self.service)
        app.router.routes.insert(0, Route("/metrics", self._metrics))
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"

    def _metrics(self, request) -> PlainTextResponse:
        self.metrics_at.append(time.monotonic())
        seconds, count = self.metrics_at[-1] - self.metrics_at[0], 2 * len(self.metrics_at)
        text = METRICS.format(generated=5000 + 200 * seconds, count=count, ttft_sum=0.3 * count)
        return PlainTextResponse(text)

    def answers(self, text: str, delay_s: float = 0.002) -> None:
        self.engine.script, self.engine.delay_s = [*text.encode(), 256], delay_s

    def prompt(self) -> str:
        """What the engine was last asked to go on with."""
        return bytes(self.engine.requests[-1].token_ids).decode()

    def until(self, condition) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server(served):
    served.answers(ANSWER)
    served.engine.requests.clear()
    served.engine.aborted.clear()
    served.engine.group, served.engine.num_wrong, served.service.draft = 3, None, None
    return served


@pytest.fixture
def visit(browser, server):
    """Opens the page; at the end of the test there must be no error in its console and no request to another origin."""
    contexts, requests, faults = [], [], []

    def note(message):
        by_browser = message.text.startswith("Failed to load resource")  # what it says of each status of 400 and above
        if message.type in ("error", "warning") and (not by_browser or "/page/" in message.location["url"]):
            faults.append(message.text)

    def open_page(width: int = 1280, height: int = 800, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", note)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(server.url)
        page.wait_for_selector("#server[data-state=ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []
    assert requests
    assert [url for url in requests if not url.startswith(server.url)] == []


def ask(page, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def is_answered(page, times: int) -> None:
    expect(page.locator(".answer[aria-busy=false]")).to_have_count(times)


class TestInBrowser:
    pytestmark = in_browser

    def test_several_turns_with_settings(self, visit, server):
        page = visit(permissions=["clipboard-read", "clipboard-write"])
        assert page.inner_text("#model") == "tiny-model"
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
        # Markup of the model's stays text; its code and bold words are shown as such.
        assert page.inner_text(".text pre") == "print('<b>42</b>')"
        assert page.inner_text("figcaption span") == "python"
        assert page.inner_text(".text strong") == "bow"
        assert page.inner_text(".text p:last-child") == "with n = 1.33 & <i>you</i>."
        assert f"{len(ANSWER.encode()) + 1} tokens" in page.inner_text(".answer footer")
        page.click(".answer footer button")
        assert page.evaluate("navigator.clipboard.readText()") == ANSWER

        server.answers("Red.")
        page.click("#chat summary:text('Settings')")  # closed settings count too
        ask(page, "Which colour is outside?")
        is_answered(page, 2)
        said = f"<user>What is a rainbow?<assistant>{ANSWER}<user>Which colour is outside?<assistant>"
        assert server.prompt() == "<system>Be brief." + said
        page.click("#new-chat")
        assert page.inner_text("#turns") == ""
        page.click(".suggestion >> nth=0")
        is_answered(page, 1)
        assert server.prompt() == "<system>Be brief.<user>Explain how a rainbow forms.<assistant>"

    @pytest.mark.parametrize("how", ["button", "escape", "new chat"])
    def test_stop(self, visit, server, how: str):
        server.answers("word " * 700, delay_s=0.02)
        page = visit()
        ask(page, "Talk.")
        expect(page.locator(".text")).to_contain_text("word word")  # before the end
        assert page.inner_text("#chat .composer button") == "Stop"
        if how == "escape":
            page.keyboard.press("Escape")
        else:
            page.click("#chat .composer button" if how == "button" else "#new-chat")
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

    def test_errors_are_shown_and_the_question_kept(self, visit, server):
        page = visit()
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
        assert page.locator("[role=alert]").count() == 1  # one turn that failed makes room for the next
        page.route("**/v1/chat/completions", lambda route: route.abort())
        ask(page, "Hello?")
        page.wait_for_selector("[role=alert]:text('cannot be reached')")
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body='data: {"choices":[]}\n\n'))
        ask(page, "Hello?")
        page.wait_for_selector("[role=alert]:text('without its end mark')")

    def test_key_is_asked_for_and_sent(self, visit, server):
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
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]

    def test_a_server_that_starts_is_waited_for(self, visit, server):
        page = visit()
        loading = {"error": {"message": "The model is loading."}}
        page.route("**/v1/models", lambda route: route.fulfill(status=503, json=loading), times=1)
        page.reload()
        page.wait_for_selector("#trouble:text('The model is loading.')")
        page.wait_for_selector("#server[data-state=ready]")
        assert not page.is_visible("#trouble")

    def test_reasoning_is_folded(self, visit):
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

    def test_completion(self, visit, server):
        page = visit()
        page.click("#tab-completion")
        fields = {"temperature": "0", "top_p": "0.5", "top_k": "7", "min_p": "0.25", "max_tokens": "20", "seed": "5"}
        for name, value in fields.items():
            page.fill(f"#completion [name={name}]", value)
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
        page.fill("#completion [name=top_p]", "0")
        page.press("#prompt", "Enter")
        page.wait_for_selector("#output-note [role=alert]:text('top_p is 0')")

    def test_token_probabilities(self, visit, server):
        server.answers("a\nb")
        page = visit()
        page.click("#tab-completion")
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

    def test_guesses_are_marked(self, visit, server):
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

    def test_without_a_draft_nothing_is_asked_for(self, visit, server):
        page = visit()
        page.click("#tab-completion")
        page.fill("#prompt", "go")
        with page.expect_request("**/v1/completions") as asked:
            page.press("#prompt", "Enter")
        page.wait_for_selector("#output-note:text('tokens')")
        assert "return_draft_spans" not in asked.value.post_data_json
        assert not page.is_visible("#draft-legend")
        assert "guesses" not in page.inner_text("#output-note")

    def test_engine_panel(self, visit, server):
        page = visit()
        page.wait_for_timeout(300)
        assert server.metrics_at == []  # nobody looks
        page.click("#tab-engine")
        expect(page.locator("#generated dd >> nth=0")).to_contain_text("0")

        def figure(name: str) -> str:
            return page.inner_text(f"#{name} dd >> nth=0")

        assert [figure(name) for name in ("running", "waiting", "kv")] == ["5", "7", "63 %"]
        assert 150 < float(figure("generated")) < 250
        assert figure("prompt-rate") == "0.0"
        assert figure("ttft") == "300 ms"
        assert page.inner_text("#ttft dd >> nth=1") == "mean of the last 2; 95 % within 500 ms"
        assert len(page.get_attribute("#running polyline", "points").split()) == 2
        page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        num_seen = len(server.metrics_at)
        page.wait_for_timeout(2500)
        assert len(server.metrics_at) == num_seen
        page.evaluate("delete document.hidden")
        page.click("#tab-chat")
        page.context.route("**/metrics", lambda route: route.fulfill(status=404, json={"error": {"message": "Off."}}))
        page.click("#tab-engine")
        page.wait_for_selector("#engine-note:text('Off.')")

    def test_keyboard_alone(self, visit, server):
        page = visit()
        assert page.evaluate("document.activeElement.id") == "message"
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        is_answered(page, 1)
        assert server.prompt() == "<user>one\ntwo<assistant>"
        for _ in range(20):
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
        for _ in range(12):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
            assert page.evaluate(outline) == "solid" or seen[-1] == "prompt"  # its box has the ring
        assert [name for name in seen if name] == [
            "prompt", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "logprobs",
        ]  # fmt: skip
        page.keyboard.press("Shift+Tab")
        assert page.evaluate("document.activeElement.labels[0].innerText.trim()") != ""

    def test_phone(self, visit, server):
        server.answers("x" * 300 + " " + ANSWER.replace("42", "4" * 200))
        page = visit(360, 640, has_touch=True, is_mobile=True)
        for view in ("chat", "completion", "engine"):
            page.click(f"#tab-{view}")
            if view == "chat":
                ask(page, "y" * 300)
                is_answered(page, 1)
            assert page.evaluate("document.documentElement.scrollWidth") == 360
            if view != "engine":
                assert not page.is_visible(f"#{view} [name=seed]")
                page.click(f"#{view} summary:text('Settings')")
                box = page.locator(f"#{view} [name=seed]").bounding_box()
                assert box["x"] + box["width"] <= 360
                button = page.locator(f"#{view} .composer button").bounding_box()
                assert button["y"] + button["height"] <= 640

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_colours_have_contrast(self, visit, scheme: str):
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
