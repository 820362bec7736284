"""Pictures that are made to harm: each is refused with a reason, or costs no more than the limits allow."""

import contextlib
import io
import pickle
import resource
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from runtime.base.types import CallboardError
from runtime.child import ChildPool
from runtime.media import processor as processor_module
from runtime.media.decode import decode
from runtime.media.expand import PreparedImage
from runtime.media.processor import ImageProcessor
from runtime.media.source import ImageFault, ImageLimits, ImageSource, TooManyPixels
from tests.media.support import Letters, encoded, picture, rule

QWEN = rule("qwen3_5", {"size": {"shortest_edge": 1024, "longest_edge": 1 << 24}}, image_token_id=7)


def decoded(data: bytes, max_pixels: int = 1_000_000) -> PreparedImage:
    return decode(data, QWEN, "auto", max_pixels, 4096)


def pixels(prepared: PreparedImage) -> np.ndarray:
    [(height, width)] = prepared.image.sizes
    return np.frombuffer(prepared.image.pixels, np.uint8).reshape(height, width, 3)


def png(width: int, height: int, rows: bytes, chunks: bytes = b"", depth: int = 8, color: int = 0) -> bytes:
    """A PNG that Pillow would not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunks + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def frames(kind: str, count: int) -> bytes:
    images = [Image.new("RGB", (8, 8), (i * 80 % 256, i // 256, 0)) for i in range(count)]
    return encoded(images[0], kind, save_all=True, append_images=images[1:])


@pytest.mark.parametrize(("data", "reason"), [
    (png(1001, 1000, bytes(1002 * 1000)), r"has 1001 x 1000 pixels, more than the limit of 1,000,000"),
    (png(60_000, 50_000, bytes(100)), "has 60000 x 50000 pixels, more than"),
    (png(1, 201, bytes(2 * 201)), r"has 1 x 201 pixels; one side may have at most 200 times"),
    (encoded(picture((60, 60)))[:2000], r"cannot be decoded: image file is truncated"),
    (encoded(picture((60, 60)), "JPEG")[:600], r"cannot be decoded"),
    (encoded(picture((60, 60)), "WEBP")[:600], r"cannot be decoded|is not a PNG"),
    (frames("GIF", 3), "has several frames"),
    (frames("PNG", 2), "has several frames"),
    (frames("WEBP", 2), "has several frames"),
    (b"", "is not a PNG, JPEG, WebP, GIF or AVIF file"),
    (b"<svg xmlns='http://www.w3.org/2000/svg' width='8' height='8'/>", "is not a PNG"),
    (b"%PDF-1.7", "is not a PNG"),
    (b"\0\0\0\x18ftypmp42" + bytes(99), "is a video, but models here read no videos; send some"),
    (b"\x1a\x45\xdf\xa3" + bytes(99), "is a video"),
    (b"RIFF\0\0\0\0AVI " + bytes(99), "is a video"),
    (b"\0\0\0\x18ftypheic" + bytes(99), "is not a PNG"),
    (encoded(picture((8, 8)), "BMP"), "is not a PNG"),
    (encoded(picture((8, 8)), "TIFF"), "is not a PNG"),
    (encoded(picture((8, 8)), "ICO"), "is not a PNG"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_refused(data: bytes, reason: str):
    with pytest.raises(ImageFault, match=reason):
        decoded(data)


def test_broken_files_are_refused_or_decoded():
    """Any byte may be wrong: the only error is an ImageFault."""
    random = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", *(["AVIF"] if features.check("avif") else [])):
        good = encoded(picture((24, 24)), kind)
        for _ in range(60):
            data = bytearray(good)
            for at in random.integers(0, len(data), 3):
                data[at] = random.integers(256)
            with contextlib.suppress(ImageFault):
                decoded(bytes(data))


def test_bytes_after_a_picture_are_ignored():
    """A file may be a picture and an archive or a page at once."""
    data = encoded(picture((64, 96)))
    for kind in (b"PK\x03\x04" + bytes(99), b"<html><script>alert(1)</script></html>", b"GIF89a" + bytes(99)):
        assert decoded(data + kind).image == decoded(data).image


def test_ten_thousand_frames_are_not_read():
    with pytest.raises(ImageFault, match="has several frames"):
        decoded(frames("GIF", 300) + bytes(10_000_000))


@pytest.mark.parametrize("orientation", range(10))
def test_exif_rotation_comes_first(orientation: int):
    image = picture((64, 96))
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("PNG", "WEBP"):
        data = encoded(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert np.array_equal(pixels(decoded(data)), np.asarray(expected.convert("RGB")))


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0" + bytes(40), b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\xff" * 5000, b"\xff" * 99]
)
def test_broken_exif_is_ignored(exif: bytes):
    image = picture((64, 96))
    assert np.array_equal(pixels(decoded(encoded(image, "PNG", exif=exif))), np.asarray(image))


def test_metadata_is_no_part_of_the_identity():
    image = picture((64, 96))
    exif = Image.Exif()
    exif[0xA420] = "another picture's id"
    plain = decoded(encoded(image))
    assert decoded(encoded(image, exif=exif)).image == plain.image
    assert decoded(encoded(image, "WEBP", lossless=True)).image == plain.image
    assert decoded(encoded(picture((64, 96), seed=1))).image.digest != plain.image.digest


def test_equal_bytes_of_other_sizes_have_other_digests():
    black = [decoded(encoded(Image.new("RGB", size))).image for size in ((64, 128), (128, 64))]
    assert black[0].pixels == black[1].pixels
    assert black[0].digest != black[1].digest


def test_transparent_pictures_are_on_white():
    alpha = np.zeros((64, 64, 4), np.uint8)
    alpha[:, 32:] = (10, 20, 30, 255)
    found = pixels(decoded(encoded(Image.fromarray(alpha))))
    assert (found[:, :32] == 255).all()
    assert (found[:, 32:] == (10, 20, 30)).all()
    random = np.random.default_rng(0).integers(0, 256, (700, 64, 4), dtype=np.uint8)
    image = Image.fromarray(random[:640])
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    assert np.array_equal(
        pixels(decoded(encoded(image))), np.asarray(Image.alpha_composite(white, image).convert("RGB"))
    )


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_modes_become_rgb(mode: str):
    image = picture((64, 96))
    if mode == "I;16":
        given = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
        expected = image.convert("L").convert("RGB")
    else:
        given = image.convert(mode)
        expected = given.convert("RGBA").convert("RGB") if mode == "LA" else given.convert("RGB")
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    data = encoded(given, kind)
    if kind == "JPEG":
        expected = Image.open(io.BytesIO(data)).convert("RGB")
    assert np.array_equal(pixels(decoded(data)), np.asarray(expected))


def test_palette_with_transparency_is_on_white():
    image = Image.new("P", (64, 64), 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.paste(1, (32, 0, 64, 64))
    found = pixels(decoded(encoded(image, transparency=0)))
    assert (found[:, :32] == 255).all()
    assert (found[:, 32:] == (0, 255, 0)).all()


def test_cameras_files_with_previews_are_pictures():
    image, preview = picture((64, 96)), picture((32, 32))
    data = encoded(image, "MPO", save_all=True, append_images=[preview])
    assert decoded(data).image.sizes == ((64, 96),)


def test_large_text_chunks_are_refused():
    text = b"key\0\0" + zlib.compress(bytes(80_000_000), 9)
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    with pytest.raises(ImageFault, match="cannot be decoded"):
        decoded(png(8, 8, bytes(9 * 8), chunk))


@pytest.mark.parametrize("detail", ["auto", "original"])
def test_a_limit_on_tokens_scales_down_or_refuses(detail: str):
    data = encoded(picture((640, 960)))  # 20 x 30 embeddings
    if detail == "original":
        with pytest.raises(ImageFault, match="has 960 x 640 pixels and needs 600 tokens, more than the limit of 100"):
            decode(data, QWEN, "original", 1_000_000, 100)
        assert decode(data, QWEN, "original", 1_000_000, 600).num_embeddings == 600
    else:
        assert 80 < decode(data, QWEN, "auto", 1_000_000, 100).num_embeddings <= 100


def test_a_picture_may_be_refused_rather_than_reduced():
    data = encoded(picture((640, 960)))
    assert decode(data, QWEN, "auto", 1_000_000, 600, may_shrink=False).num_embeddings == 600
    with pytest.raises(
        TooManyPixels, match=r"has 960 x 640 pixels, but the model sees 384 x 256 \(oversized"
    ) as caught:
        decode(data, QWEN, "auto", 1_000_000, 100, may_shrink=False)
    assert pickle.loads(pickle.dumps(caught.value)).max_side == caught.value.max_side == 384


# --- in the child


@pytest.fixture(scope="module")
def processor() -> ImageProcessor:
    return ImageProcessor(QWEN, Letters(), ImageLimits(max_image_bytes=30_000_000))


def test_the_largest_picture_fits_the_childs_memory(processor):
    """In each mode, rotated, and of 32 million pixels."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for mode in ("RGB", "RGBA", "CMYK"):
        kind = "JPEG" if mode == "CMYK" else "PNG"
        data = encoded(Image.new(mode, (8000, 4000), 77), kind, exif=exif)
        assert processor.prepare_one(ImageSource(data)).num_embeddings <= 4096


def test_a_bomb_of_144_megapixels_is_refused(processor):
    bomb = png(12_000, 12_000, bytes(1502 * 12_000), depth=1)
    assert len(bomb) < 200_000
    with pytest.raises(CallboardError, match="Image 2 has 12000 x 12000 pixels, more than the limit"):
        processor.prepare([ImageSource(encoded(picture((9, 9)))), ImageSource(bomb)])


def test_a_child_without_memory_or_time_ends_alone(processor, monkeypatch):
    """The next picture gets another child."""

    good = [ImageSource(encoded(picture((9, 9))))]
    for exhaust, reason in ((_exhaust_memory, "took more memory"), (_exhaust_time, "took more CPU time")):
        with monkeypatch.context() as patched:
            patched.setattr(processor_module, "_decode", exhaust)
            with pytest.raises(CallboardError, match=f"Image 1 cannot be decoded: it {reason} than the limit"):
                processor.prepare(good)
        assert processor.prepare(good)


def _exhaust_memory(*args: object) -> bytes:
    return bytes(bytearray(1 << 30)[:1])


def _exhaust_time(*args: object) -> None:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1, resource.RLIM_INFINITY))
    while True:
        pass


def test_threads_share_a_processor(processor):
    files = [encoded(picture((40 + i, 60), seed=i)) for i in range(8)]
    alone = [decode(data, QWEN, "auto", 32_000_000, 4096).image for data in files]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            found = list(threads.map(lambda data: processor.prepare([ImageSource(data)])[0].image, files))
            assert found == alone


def test_limits_of_a_request():
    data = encoded(picture((64, 64)))
    small = ImageProcessor(
        QWEN, Letters(), ImageLimits(max_images=2, max_image_bytes=len(data), max_request_pixels=9000)
    )
    assert len(small.prepare([ImageSource(data)] * 2)) == 2
    with pytest.raises(CallboardError, match="The request has 3 images; this server takes up to 2"):
        small.prepare([ImageSource(data)] * 3)
    with pytest.raises(CallboardError, match=r"Image 1 has [\d,]+ bytes, more than the limit"):
        small.prepare([ImageSource(data + b"x")])
    small.limits = ImageLimits(max_request_pixels=5000)
    with pytest.raises(CallboardError, match="have over 5,000 pixels after resizing"):
        small.prepare([ImageSource(data)] * 2)


def test_a_child_is_ready_before_the_first_picture(monkeypatch):
    pool = ChildPool(1, 768 << 20, 5, processor_module._warm_up)
    monkeypatch.setattr(processor_module, "_CHILDREN", pool)
    assert ImageProcessor.of(None, Letters(), ImageLimits()) is None
    assert pool._num_children == 0, "a model without images starts none"
    assert ImageProcessor.of(QWEN, Letters(), ImageLimits()) is not None
    child = pool._idle.get(timeout=300)
    assert child is not None
    child.kill()
    pool.close()


def test_pillow_stays_in_the_child():
    code = (
        "import sys\n"
        "from runtime.media.families import rule_of\n"
        "from runtime.media.processor import ImageProcessor\n"
        "from runtime.media.source import ImageLimits, ImageSource\n"
        "class Empty:\n    encode = lambda *a: []\n    decode = lambda *a, **k: ''\n"
        "rule = rule_of({'model_type': 'qwen3_5', 'vision_config': {'depth': 1}}, {})\n"
        f"data = {encoded(picture((9, 9)))!r}\n"
        "assert ImageProcessor(rule, Empty(), ImageLimits()).prepare([ImageSource(data)])\n"
        "assert not {'PIL', 'torch', 'httpx'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
