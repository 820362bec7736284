"""Pictures in the messages of a Python program."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.output.fields import FieldError
from runtime.output.image_forms import file_of, with_marks

ARRAY = np.full((2, 3, 3), 7, np.uint8)
URL = "data:;base64,aaaa"


def picture(value: Any, kind: str = "image") -> list[dict[str, Any]]:
    part = {"type": kind, kind: value, "detail": "low"}
    return [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]


def test_templates_see_plain_parts(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"abc")
    values = ARRAY, Image.fromarray(ARRAY), tmp_path / "a.png", str(tmp_path / "a.png"), b"abc", URL
    found = [with_marks(picture(value)) for value in values] + [with_marks(picture({"url": URL}, "image_url"))]
    assert all(plain[0]["content"] == [{"type": "text", "text": "What?"}, {"type": "image"}] for plain, _ in found)
    sources = [source for _, (source,) in found]
    assert {source.detail for source in sources} == {"low"}
    assert [source.data for source in sources[2:5]] == [b"abc"] * 3
    assert sources[0].data == sources[1].data == file_of("a", ARRAY)
    assert [source.url for source in sources] == [""] * 5 + [URL] * 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.zeros((2, 2, 3)), "is an array of float64"),
        ("no/such.png", "cannot be read: No such file"),
        (7, "is a int; send a PIL image"),
        (None, "has no picture"),
    ],
)
def test_a_value_without_a_picture_is_refused(value: Any, says: str):
    with pytest.raises(FieldError, match=says) as caught:
        with_marks(picture(value))
    assert caught.value.field == "messages.0.content.1"


def test_a_video_is_refused_by_name():
    with pytest.raises(FieldError, match=r'content.1.type is "video": .* send some of its frames as images'):
        with_marks(picture("a.mp4", "video"))


def test_texts_stay_as_they_are():
    messages = [{"role": "user", "content": "image"}, {"role": "user", "content": [{"type": "text", "text": "image"}]}]
    assert with_marks(messages) == (messages, [])
