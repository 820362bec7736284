"""Pictures in requests: the forms of all APIs, where their tokens stand, and refusals."""

import base64
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from runtime.base.images import ImageSpan
from runtime.base.model.pooling import Pooling
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import MODEL, assert_error
from tests.support.http.fake_images import (
    NO_IMAGES_OF_TOOLS,
    PNG,
    TEMPLATE,
    URL,
    FakeImages,
    app_with_images,
    client_with_images,
    engine_with_images,
    shown_prompt,
)

pytestmark = pytest.mark.usefixtures("shared_compiler")
IMAGE_URL = {"type": "image_url", "image_url": {"url": URL}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
SEEN = "*********"  # nine bytes
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def text(of: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": of}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "Read", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [text("seen"), BLOCK]}
FUNCTION_CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": [text("seen", "input_text"), INPUT_IMAGE]}
TWO = f"<user>{SEEN} and {SEEN}<assistant>"


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (CHAT, {"messages": [user(IMAGE_URL, text(" and "), IMAGE_URL)]}, TWO),
        (CHAT, {"messages": [user({"type": "image_url", "image_url": URL, "uuid": "x"})]}, f"<user>{SEEN}<assistant>"),
        (CHAT, {"messages": [user(IMAGE_URL), {"role": "assistant", "content": "A."}, user(text("So?"))]}, None),
        (RESPONSES, {"input": [user(INPUT_IMAGE, text(" and ", "input_text"), INPUT_IMAGE)]}, TWO),
        (MESSAGES, {"max_tokens": 9, "messages": [user(BLOCK, text(" and "), BLOCK)]}, TWO),
        ("/api/chat", {"messages": [{"role": "user", "content": "What?", "images": [PNG]}]}, None),
        ("/api/generate", {"prompt": "What?", "images": [PNG]}, f"<user>{SEEN}What?<assistant>"),
    ],
)
async def test_each_form_becomes_tokens(path: str, body: dict[str, Any], prompt: str | None):
    engine = engine_with_images()
    async with client_with_images(engine) as client:
        answer = await client.post(path, json={"model": MODEL, "stream": False} | body)
    assert answer.status_code == 200, answer.text
    assert "x-callboard-ignored-fields" not in answer.headers
    shown, (request,) = shown_prompt(engine), engine.requests
    assert SEEN in shown
    assert prompt in (None, shown)
    assert all(shown[span.begin : span.end] == SEEN for span in request.images)
    assert sum(span.num_tokens for span in request.images) == shown.count("*")
    usage = answer.json().get("usage", answer.json())
    counts = {usage.get(name) for name in ("prompt_tokens", "input_tokens", "prompt_eval_count")}
    num_cached = usage.get("cache_read_input_tokens", 0)  # Anthropic's input tokens are the others
    assert counts - {None} == {len(request.token_ids) - num_cached}


@pytest.mark.parametrize("template", [TEMPLATE, NO_IMAGES_OF_TOOLS])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"max_tokens": 9, "messages": [user(text("Look.")), CALL, user(RESULT, text("Well?"))]}),
        (MESSAGES, {"max_tokens": 9, "messages": [user(text("Look.")), CALL, user(RESULT)]}),
        (RESPONSES, {"input": [{"role": "user", "content": "Look."}, FUNCTION_CALL, OUTPUT]}),
    ],
)
async def test_a_screenshot_of_a_tool_is_seen(path: str, body: dict[str, Any], template: str):
    engine = engine_with_images()
    async with client_with_images(engine, template) as client:
        answer = await client.post(path, json={"model": MODEL} | body)
    assert answer.status_code == 200, answer.text
    shown = shown_prompt(engine)
    assert shown.index("seen") < shown.index(SEEN) < shown.rindex("<assistant>")
    assert shown.count(SEEN) == 1


async def test_clients_send_pictures():
    engine = engine_with_images("I see.")
    http = client_with_images(engine)
    ask = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
    chat = await ask.chat.completions.create(model=MODEL, messages=[user(IMAGE_URL)])
    assert chat.choices[0].message.content == "I see."
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(engine.requests[0].token_ids)
    response = await ask.responses.create(model=MODEL, input=[user(INPUT_IMAGE)])
    items = await ask.responses.input_items.list(response.id)
    assert items.data[0].content[0].image_url == URL
    again = await ask.responses.create(model=MODEL, previous_response_id=response.id, input="Sure?")
    assert again.output_text == "I see."
    assert shown_prompt(engine).count(SEEN) == 1
    counted = await ask.responses.input_tokens.count(model=MODEL, input=[user(INPUT_IMAGE)])
    assert counted.input_tokens == len(engine.requests[1].token_ids)
    transport = httpx2.ASGITransport(app_with_images(engine))
    claude = anthropic.AsyncAnthropic(
        base_url="http://test", api_key="none", http_client=httpx2.AsyncClient(transport=transport)
    )
    message = await claude.messages.create(model=MODEL, max_tokens=9, messages=[user(BLOCK)])
    counted = await claude.messages.count_tokens(model=MODEL, messages=[user(BLOCK)])
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert counted.input_tokens == len(engine.requests[-1].token_ids)


async def test_tokenize_shows_the_tokens_of_images():
    async with client_with_images(engine_with_images()) as client:
        answer = await client.post("/tokenize", json={"messages": [user(IMAGE_URL)]})
    assert answer.json()["tokens"].count(257) == len(SEEN)


async def test_instructions_keep_the_pictures_beside_them():
    engine = engine_with_images()
    leading = [
        {"role": "system", "content": [text("A ", "input_text"), INPUT_IMAGE]},
        {"role": "developer", "content": "B"},
    ]
    async with client_with_images(engine) as client:
        for parts in (leading, leading[1:]):
            body = {"input": [*parts, user(INPUT_IMAGE)], "instructions": "Be."}
            answer = await client.post(RESPONSES, json=body)
            assert answer.status_code == 200, answer.text
    assert shown_prompt(engine, 0) == f"<system>Be.\n\nA {SEEN}\n\nB<user>{SEEN}<assistant>"
    assert shown_prompt(engine, 1) == f"<system>Be.\n\nB<user>{SEEN}<assistant>"


async def test_usage_counts_the_tokens_of_images():
    async with client_with_images(engine_with_images()) as client:
        chat = await client.post(CHAT, json={"messages": [user(IMAGE_URL, text(" and "), IMAGE_URL)], "n": 2})
        response = await client.post(RESPONSES, json={"input": [user(INPUT_IMAGE)]})
        plain = await client.post(CHAT, json={"messages": [user(text("a"))]})
    assert chat.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * len(SEEN)
    assert response.json()["usage"]["input_tokens_details"]["image_tokens"] == len(SEEN)
    assert "image_tokens" not in plain.json()["usage"]["prompt_tokens_details"]


async def test_detail_reaches_the_processor():
    images, engine = FakeImages(), engine_with_images()
    async with client_with_images(engine, TEMPLATE, images) as client:
        low = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
        await client.post(CHAT, json={"messages": [user(low)]})
        await client.post(RESPONSES, json={"input": [user(INPUT_IMAGE | {"detail": "original"})]})
    assert [source.detail for source in images.sources] == ["low", "original"]
    assert [span.num_tokens for request in engine.requests for span in request.images] == [1, len(SEEN)]


async def test_text_does_not_forge_a_mark():
    engine = engine_with_images()
    async with client_with_images(engine) as client:
        await client.post(CHAT, json={"messages": [user(text("An <image> here: "), IMAGE_URL)]})
    (span,) = engine.requests[0].images
    assert isinstance(span, ImageSpan)
    assert shown_prompt(engine)[: span.begin] == "<user>An <image> here: "


async def test_a_message_that_spells_a_mark_is_named():
    async with client_with_images(engine_with_images(), TEMPLATE, None, True) as client:
        forged = [user(IMAGE_URL), {"role": "assistant", "content": "A."}, user(text("An <image>."))]
        answer = await client.post(CHAT, json={"messages": forged})
    assert_error(answer, 400, "messages.2.content", "2 image marks for 1 images")


async def test_pictures_are_prepared_in_threads():
    images = FakeImages()
    async with client_with_images(engine_with_images(), TEMPLATE, images) as client:
        await client.post(CHAT, json={"messages": [user(IMAGE_URL)]})
        await client.post(RESPONSES, json={"input": [user(INPUT_IMAGE)]})
    assert {name.rpartition("_")[0] for name in images.threads} == {"images"}


async def test_choices_share_the_pictures():
    engine = engine_with_images()
    async with client_with_images(engine) as client:
        await client.post(CHAT, json={"messages": [user(IMAGE_URL)], "n": 2})
    assert engine.requests[0].images == engine.requests[1].images != ()


BAD = {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(b"bad").decode()}}
SYSTEM = {"role": "system", "content": [IMAGE_URL]}
FILE = {"type": "input_image", "file_id": "file-1"}


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {"messages": [user(text("a"), BAD)]}, "messages.0.content.1", "messages.0.content.1 cannot be decoded"),
        (CHAT, {"messages": [user(*[IMAGE_URL] * 3)]}, "messages.0.content.2", "this server allows 2 (max_images)"),
        (CHAT, {"messages": [user(IMAGE_URL)], "prompt_logprobs": 1}, "prompt_logprobs", "no prompt with images has"),
        (CHAT, {"messages": [user(IMAGE_URL)], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "no prompt"),
        (CHAT, {"messages": [user({"type": "image_url"})]}, "messages.0.content.0", "has no picture"),
        (CHAT, {"messages": [user(IMAGE_URL | {"detail": "much"})]}, "messages.0.content.0.detail", "auto"),
        (CHAT, {"messages": [SYSTEM, user(text("a"))]}, "messages.0.content.0", "0 image marks for 1 images"),
        (RESPONSES, {"input": [user(FILE)]}, "input.0.content.0", "keeps no pictures"),
        (MESSAGES, {"max_tokens": 9, "messages": [user(BLOCK | {"source": {"type": "file"}})]}, None, "keeps no"),
        ("/api/chat", {"messages": [user() | {"content": "", "images": ["YmFk"]}]}, None, "messages.0.images.0 cannot"),
        ("/api/generate", {"prompt": "a", "images": ["YmFk"]}, None, "images.0 cannot be decoded"),
    ],
)  # fmt: skip
async def test_a_refusal_names_the_part(path: str, body: dict[str, Any], param: str | None, says: str):
    template = "{% for m in messages if m.role != 'system' %}" + TEMPLATE.partition("%}")[2]
    images = FakeImages(max_images=2)
    async with client_with_images(engine_with_images(), template, images) as client:
        answer = await client.post(path, json={"model": MODEL} | body)
    assert answer.status_code == 400, answer.text
    assert says in answer.text
    if param is not None:
        assert_error(answer, 400, param, says)


MP4 = {"media_type": "video/mp4", "type": "base64", "data": PNG}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [user({"type": "video_url", "video_url": {"url": URL}})]}, "messages.0.content.0.type"),
        (CHAT, {"messages": [user({"type": "video", "video": URL})]}, "messages.0.content.0.type"),
        (CHAT, {"messages": [user({"type": "input_video", "data": PNG})]}, "messages.0.content.0.type"),
        (RESPONSES, {"input": [user({"type": "input_video", "video_url": URL})]}, "input.0.content.0.type"),
        (MESSAGES, {"max_tokens": 9, "messages": [user({"type": "video", "source": MP4})]}, None),
        ("/api/chat", {"messages": [{"role": "user", "content": "What?", "videos": [PNG]}]}, None),
        ("/api/generate", {"prompt": "What?", "videos": [PNG]}, None),
        ("/v1/embeddings", {"messages": [user({"type": "video_url", "video_url": {"url": URL}})]}, None),
    ],
)
async def test_a_video_is_refused_by_name(path: str, body: dict[str, Any], param: str | None):
    async with client_with_images(engine_with_images()) as client:
        answer = await client.post(path, json={"model": MODEL} | body)
    assert answer.status_code == 400, answer.text
    assert "video" in answer.text
    assert "send some of its frames as images" in answer.text
    if param is not None:
        assert_error(answer, 400, param, "frames")


async def test_a_picture_may_not_exceed_the_context():
    async with client_with_images(engine_with_images()) as client:
        large = {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(bytes(5000)).decode()}}
        answer = await client.post(CHAT, json={"messages": [user(large)]})
    assert_error(answer, 400, "messages", "maximum context length is 4096", "context_length_exceeded")


async def test_large_pictures_are_listed_as_anthropic_does():
    app = app_with_images(engine_with_images(), TEMPLATE, FakeImages(max_image_pixels=8))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    claude = anthropic.AsyncAnthropic(base_url="http://test", api_key="none", http_client=http)
    with pytest.raises(anthropic.BadRequestError) as caught:
        await claude.messages.create(model=MODEL, max_tokens=9, messages=[user(BLOCK), CALL, user(RESULT)])
    details = caught.value.body["error"]["details"]
    paths = ["messages.0.content.0", "messages.2.content.0.content.1"]
    assert details == {"error_code": "image_dimensions_too_large", "max_side_length_pixels": 2, "paths": paths}


async def test_an_oversized_image_is_an_error_if_asked():
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app_with_images(engine_with_images())))
    claude = anthropic.AsyncAnthropic(base_url="http://test", api_key="none", http_client=http)
    whole, downsized, odd = ({"transformations": {"oversized_image": way}} for way in ("error", "downsize", "crop"))
    await claude.messages.create(model=MODEL, max_tokens=9, messages=[user(BLOCK, BLOCK | downsized)])
    with pytest.raises(anthropic.BadRequestError, match=r"messages.0.content.1 is large\.") as caught:
        await claude.messages.create(model=MODEL, max_tokens=9, messages=[user(BLOCK, BLOCK | whole)])
    details = caught.value.body["error"]["details"]
    paths = ["messages.0.content.1"]
    assert details == {"error_code": "image_dimensions_too_large", "max_side_length_pixels": 7, "paths": paths}
    with pytest.raises(anthropic.BadRequestError, match='oversized_image is "crop"; it should be downsize or error'):
        await claude.messages.create(model=MODEL, max_tokens=9, messages=[user(BLOCK | odd)])


async def test_bodies_may_be_longer_with_images():
    assert HttpSettings().longest_body(takes_images=False) == 8 << 20
    async with client_with_images(engine_with_images()) as client:
        answer = await client.post(CHAT, json={"messages": [user(text("x" * (9 << 20)))]})
        assert_error(answer, 400, "messages", "over 4194304 characters")
        answer = await client.post(CHAT, content=b" " * (33 << 20), headers={"content-type": "application/json"})
    assert_error(answer, 413, None, "over 33554432 bytes", "body_too_large")


async def test_an_engine_without_encoder_refuses_pictures():
    engine = engine_with_images()
    engine.info = replace(engine.info, images=None)
    async with client_with_images(engine) as client:
        answer = await client.post(CHAT, json={"messages": [user(IMAGE_URL)]})
    assert_error(answer, 400, "messages.0.content.0.type", "its encoder is off (images) or not among its files")


async def test_a_chat_with_pictures_has_an_embedding():
    engine = engine_with_images()
    engine.info = replace(engine.info, pooling=Pooling("last", normalized=True))
    body = {"model": MODEL, "messages": [user(IMAGE_URL, text("aab"))]}
    async with client_with_images(engine) as client:
        for path in ("/v1/embeddings", "/pooling"):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert shown_prompt(engine) == f"<user>{SEEN}aab"
            assert len(engine.requests[-1].images) == 1
        await client.post("/v1/embeddings", json={"messages": [user(text("aab"))], "add_generation_prompt": True})
        assert shown_prompt(engine) == "<user>aab<assistant>"
        both = await client.post("/v1/embeddings", json=body | {"input": "a"})
        assert_error(both, 400, "input", "not both")
        engine.info = replace(engine.info, images=None)
        ended = [*body["messages"], {"role": "assistant", "content": ""}]
        refused = await client.post("/v1/embeddings", json=body | {"messages": ended, "continue_final_message": True})
    assert_error(refused, 400, "messages.0.content.0.type", "takes no images")
