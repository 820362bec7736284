"""A model that takes images, for tests of the front end: pictures are not decoded."""

import base64
import threading
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from types import SimpleNamespace

import httpx
from starlette.applications import Starlette

from runtime.base.images import Image, ImageInfo, ImageSpan
from runtime.base.types import CallboardError
from runtime.media.expand import PreparedImage
from runtime.media.source import ImageFault, ImageLimits, ImageSource, TooManyPixels
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer

MARK, MARK_ID = "<image>", 257
PNG = base64.b64encode(b"a picture").decode()
URL = f"data:image/png;base64,{PNG}"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_IMAGES_OF_TOOLS = TEMPLATE.replace("part.type == 'image'", "part.type == 'image' and m.role != 'tool'").replace(
    "part.text }}", "part.text or '' }}"
)


class FakeImages:
    """A picture has a token for each byte of its file, or one with the detail `low`."""

    rule = SimpleNamespace(marks=SimpleNamespace(mark=MARK_ID))

    def __init__(self, **limits) -> None:
        self.limits = ImageLimits(**limits)
        self.sources: list[ImageSource] = []
        self.threads: set[str] = set()

    def prepare_one(self, source: ImageSource) -> PreparedImage:
        self.sources.append(source)
        self.threads.add(threading.current_thread().name)
        data = source.data or base64.b64decode(source.url.partition(",")[2])
        if data.startswith(b"bad"):
            raise ImageFault("cannot be decoded")
        if len(data) > self.limits.max_image_pixels:
            raise TooManyPixels(f"has {len(data)} pixels", 2)
        if not source.may_shrink:
            raise TooManyPixels("is large", 7)
        image = Image(blake2b(data, digest_size=16).digest(), ((1, len(data)),), 3 * data)
        return PreparedImage(image, (0, 0), 1 if source.detail == "low" else len(data))

    def expand(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        if ids.count(MARK_ID) != len(images):
            raise CallboardError(f"The prompt has {ids.count(MARK_ID)} image marks for {len(images)} images.")
        found, spans, left = [], [], iter(images)
        for each in ids:
            if each == MARK_ID:
                prepared = next(left)
                spans.append(ImageSpan(len(found), prepared.num_embeddings, prepared.image))
                found += [MARK_ID] * prepared.num_embeddings
            else:
                found.append(each)
        return found, tuple(spans)


def engine_with_images(text: str = "ok") -> FakeEngine:
    engine = FakeEngine(text, max_model_len=4096)
    engine.info = replace(engine.info, images=ImageInfo(MARK_ID, 4096, 4096))
    return engine


def app_with_images(engine: FakeEngine, *model, **options) -> Starlette:
    """The app of `service_with_images`."""
    return build_http_app(service_with_images(engine, *model, **options))


def service_with_images(
    engine: FakeEngine, template: str = TEMPLATE, images: FakeImages | None = None, spells_marks: bool = False
) -> Service:
    service, tokenizer = Service(engine, None, MODEL), byte_tokenizer(template, (MARK,))
    tokenizer.special_tokens_in_contents = spells_marks
    service.start(tokenizer, images=images or FakeImages())
    return service


def client_with_images(engine: FakeEngine, *model) -> httpx.AsyncClient:
    """A client of `app_with_images`."""
    transport = httpx.ASGITransport(app_with_images(engine, *model), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def shown_prompt(engine: FakeEngine, at: int = -1) -> str:
    """A request's prompt with `*` for each token of an image."""
    return bytes(ord("*") if i == MARK_ID else i for i in engine.requests[at].token_ids).decode()
