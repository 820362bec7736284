"""The page's pictures: chosen, pasted, dropped, removed, refused, sent again with each turn, kept and exported."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect

from runtime.base.images import ImageInfo
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import byte_tokenizer
from tests.support.http.fake_images import MARK, MARK_ID, TEMPLATE, FakeImages
from tests.support.http.page_browser import Server, ask, is_answered

MOST_BYTES = 1 << 20
GIVE = """([how, bytes, name, type]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(bytes)], name, { type }));
  const box = document.getElementById('message');
  const options = { bubbles: true, cancelable: true };
  if (how === 'paste') box.dispatchEvent(new ClipboardEvent('paste', { ...options, clipboardData: data }));
  else for (const kind of ['dragover', 'drop']) {
    box.dispatchEvent(new DragEvent(kind, { ...options, dataTransfer: data }));
  }
}"""


def png(shade: int, size: tuple[int, int] = (60, 40)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade, 90, 160)).save(file, "PNG")
    return file.getvalue()


def give(page, how: str, content: bytes, name: str = "sky.png", kind: str = "image/png") -> None:
    """Choose, paste or drop a picture."""
    if how == "choose":
        page.set_input_files("#attach input", {"name": name, "mimeType": kind, "buffer": content})
    else:
        page.evaluate(GIVE, [how, [*content], name, kind])


@pytest.fixture(scope="module")
def served():
    server = Server(HttpSettings(max_images=3, max_image_bytes=MOST_BYTES))
    server.engine.info = replace(server.engine.info, images=ImageInfo(MARK_ID, 4096, 4096))
    yield server
    server.close()


@pytest.fixture
def images(server) -> FakeImages:
    server.service.start(byte_tokenizer(TEMPLATE, (MARK,)), images=(images := FakeImages()))
    return images


def seen(images: FakeImages) -> list[bytes]:
    """The pictures that requests had, in order."""
    return [base64.b64decode(source.url.partition(",")[2]) or source.data for source in images.sources]


@pytest.mark.parametrize("how", ["choose", "paste", "drop"])
def test_picture_is_sent_with_its_message(visit, server, images, how: str):
    page = visit()
    give(page, how, png(200))
    expect(page.locator(".tray img")).to_have_count(1)
    ask(page, "Which colour?")
    is_answered(page, 1)
    assert seen(images) == [png(200)]
    assert page.locator(".tray").is_hidden()
    expect(page.locator(".message img")).to_have_js_property("naturalWidth", 60)
    ask(page, "And now?")  # the next turn has it, too
    is_answered(page, 2)
    assert seen(images) == [png(200)] * 2


def test_pictures_can_be_removed_and_sent_alone(visit, server, images):
    page = visit()
    for shade in (1, 2):
        give(page, "paste", png(shade), f"{shade}.png")
    page.click("[aria-label='Remove “1.png”']")
    page.click("#chat .composer .primary")
    is_answered(page, 1)
    assert seen(images) == [png(2)]
    assert page.inner_text("#chats .title") == "Picture"


def test_pictures_beyond_limits_are_refused_with_a_sentence(visit, server, images):
    page = visit()
    give(page, "drop", b"text", "notes.txt", "text/plain")
    expect(page.locator(".tray .error")).to_have_text(
        "“notes.txt” is of the type text/plain; choose PNG, JPEG, WebP, GIF or AVIF."
    )
    give(page, "choose", bytes(MOST_BYTES + 1))
    expect(page.locator(".tray .error")).to_contain_text("this server takes at most 1.0 MiB a picture.")
    for shade in range(4):
        give(page, "choose", png(shade))
    expect(page.locator(".tray .error")).to_have_text(
        "This server takes at most 3 pictures a chat; remove one, or start a new chat."
    )
    expect(page.locator(".tray img")).to_have_count(3)


def test_refused_picture_returns_to_the_message(visit, server, images):
    page = visit()
    give(page, "paste", b"bad")
    expect(page.locator(".tray img")).to_have_count(1)
    ask(page, "What is it?")
    expect(page.locator(".answer [role=alert]")).to_contain_text("cannot be decoded")
    assert page.input_value("#message") == "What is it?"
    expect(page.locator(".tray img")).to_have_count(1)


def test_models_without_images_have_no_button(visit, server, images):
    server.service.start(byte_tokenizer(), images=None)
    page = visit()
    assert page.locator("#attach").is_hidden()
    give(page, "paste", png(1))
    expect(page.locator(".tray .error")).to_have_text("This model takes no pictures.")


def test_edited_message_keeps_its_pictures(visit, server, images):
    page = visit()
    give(page, "choose", png(9))
    ask(page, "Red?")
    is_answered(page, 1)
    page.hover(".asked")
    page.click(".asked button:text('Edit')")
    page.fill(".editor textarea", "Blue?")
    page.press(".editor textarea", "Enter")
    expect(page.locator(".question")).to_have_text("Blue?")
    is_answered(page, 1)
    assert seen(images) == [png(9)] * 2


@pytest.mark.parametrize("form", ["json", "markdown"])
def test_pictures_survive_reloads_and_exports(visit, server, images, tmp_path: Path, form: str):
    page = visit()
    give(page, "choose", png(5), "a [b].png")
    ask(page, "One?")
    is_answered(page, 1)
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    expect(page.locator(".message img")).to_have_js_property("naturalWidth", 60)
    with page.expect_download() as download:
        page.click(f"#export-{form}")
    download.value.save_as(file := tmp_path / f"chats.{'json' if form == 'json' else 'md'}")
    other = visit()  # another browser
    other.set_input_files("#import", file)
    expect(other.locator(".message img")).to_have_js_property("naturalWidth", 60)
    ask(other, "Two?")
    is_answered(other, 2)
    assert seen(images) == [png(5)] * 2


def test_faulty_pictures_of_imported_files_are_left_out(visit, server, images, tmp_path: Path):
    turn = {"question": "Q", "text": "A", "images": [{"name": "x", "url": "https://example.com/x.png"}, 7]}
    (tmp_path / "chats.json").write_text(json.dumps({"format": "callboard-chats", "chats": [{"turns": [turn]}]}))
    page = visit()
    page.set_input_files("#import", tmp_path / "chats.json")
    expect(page.locator(".question")).to_have_text("Q")
    assert page.locator(".message img").count() == 0


def test_pictures_of_deleted_chats_are_forgotten(visit, server, images):
    page = visit()
    give(page, "choose", png(5))
    ask(page, "One?")
    is_answered(page, 1)
    page.hover("#chats li")
    page.click("#chats [aria-label^=Delete]")
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    keys = """() => new Promise(done => { indexedDB.open('callboard').onsuccess = ({ target: { result } }) => {
      const all = result.transaction('pictures').objectStore('pictures').getAllKeys();
      all.onsuccess = () => done(all.result);
    } })"""
    for _ in range(100):
        if not page.evaluate(keys):
            break
        page.wait_for_timeout(20)
    assert page.evaluate(keys) == []


def test_copied_requests_have_pictures(visit, server, images):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    give(page, "choose", png(5))
    expect(page.locator(".tray img")).to_have_count(1)
    page.click("#chat [aria-label='Copy as curl']")
    page.wait_for_selector("#chat .menu :text('Copied')")
    text = page.evaluate("navigator.clipboard.readText()")
    (url,) = re.findall(r'"url": "data:image/png;base64,([^"]*)"', text)
    assert base64.b64decode(url) == png(5)
