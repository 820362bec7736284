"""Fixtures of the page's tests: headless Chromium, a server, and a page of it."""

import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.support.http.page_browser import ANSWER, Server

TIMEOUT_MS = 120_000  # only a fault reaches it
expect.set_options(timeout=TIMEOUT_MS)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; `apt-get install chromium` brings one")
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
    served.engine.sleep_level = 0
    served.engine.group, served.engine.num_wrong, served.service.draft = 3, None, None
    return served


@pytest.fixture
def visit(browser, server):
    """Opens the page; at the end of the test there must be no error in its console and no request to another origin."""
    contexts, requests, faults = [], [], []

    def note(message):
        by_browser = message.text.startswith("Failed to load resource")  # its message for each status of 400 and above
        if message.type in ("error", "warning") and (not by_browser or "/page/" in message.location["url"]):
            faults.append(message.text)

    def open_page(width: int = 1280, height: int = 800, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(TIMEOUT_MS)
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
