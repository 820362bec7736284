"""Marks in a prompt become image tokens, as transformers' processors write them."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.base.images import Image
from runtime.base.types import CallboardError
from runtime.media.expand import Expander, PreparedImage
from runtime.media.rule import Detail, ImageRule
from tests.media.support import SIZES, Letters, rule

IMAGE = 7  # token id of an embedding


def prepared(rule: ImageRule, size: tuple[int, int], detail: Detail = "auto") -> PreparedImage:
    plan = rule.resize.plan(size, detail, 16_384)
    return PreparedImage(Image(b"digest", plan.parts), plan.tiles, rule.num_embeddings(plan.parts))


def texts(rule: ImageRule, vocabulary: Letters, prompt: list[int], *sizes: tuple[int, int]) -> str:
    """The text of a prompt after its marks became images, with each span checked."""
    ids, spans = Expander(rule, vocabulary).expand(prompt, [prepared(rule, size) for size in sizes])
    for span in spans:
        assert ids[span.begin] == ids[span.end - 1] == rule.token_id
    inside = [i for span in spans for i in range(span.begin, span.end) if ids[i] == rule.token_id]
    assert inside == [i for i, token in enumerate(ids) if token == rule.token_id]
    return vocabulary.decode(ids)


def test_pixtral_rows():
    vocabulary = Letters("a", "b", "c", "d", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    family = rule("mistral3", vision_config={"patch_size": 14, "image_size": 1540}, image_token_index=IMAGE)
    row = "[IMG]" * 3
    assert texts(family, vocabulary, [3, IMAGE, 4], (50, 70)) == f"a{row}[IMG_BREAK]{row}[IMG_END]b"


@pytest.mark.parametrize("size", SIZES)
def test_smolvlm_tiles(size: tuple[int, int]):
    processing = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    specials = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    vocabulary = Letters("a", "b", "c", "d", "<image>", "<fake_token_around_image>", "<global-img>", *specials)
    for longest in (2048, 512):
        family = rule(
            "smolvlm", {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 512}},
            vision_config={"patch_size": 16}, scale_factor=4, image_token_id=IMAGE,
        )  # fmt: skip
        rows, columns = prepared(family, size).tiles
        theirs = processing.get_image_prompt_string(
            rows, columns, 64, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        assert texts(family, vocabulary, [3, IMAGE, 4], size) == f"a{theirs}b"
        ids, _ = Expander(family, vocabulary).expand([IMAGE], [prepared(family, size)])
        assert ids == vocabulary.encode(theirs)  # the newlines before the thumbnail are one token


@pytest.mark.parametrize("size", SIZES)
def test_lfm2_tiles(size: tuple[int, int]):
    processing = pytest.importorskip("transformers.models.lfm2_vl.processing_lfm2_vl")
    specials = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]
    vocabulary = Letters(
        "a", "b", "c", "d", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *specials
    )
    family = rule("lfm2_vl", image_token_id=IMAGE)
    image = prepared(family, size)
    rows, columns = image.tiles if image.tiles != (0, 0) else (1, 1)
    names: Any = SimpleNamespace(
        image_start_token="<|image_start|>", image_token="<image>",
        image_thumbnail_token="<|img_thumbnail|>", image_end_token="<|image_end|>",
    )  # fmt: skip
    whole = family.num_embeddings(image.image.sizes[-1:])
    theirs = processing.Lfm2VlProcessor._build_image_tokens(names, rows, columns, 256, whole, True, True)
    assert texts(family, vocabulary, [3, IMAGE, 4], size) == f"a{theirs}b"


def test_lfm2_grids():
    """Sizes that transformers' functions gave for these pictures."""
    family = rule("lfm2_vl")
    for size, sizes, tiles, thumbnail in [
        ((300, 500), ((288, 512),), (0, 0), None),
        ((1080, 1920), ((1024, 2048),), (2, 4), (384, 672)),
        ((2000, 1500), ((1536, 1024),), (3, 2), (576, 416)),
        ((40, 1900), ((64, 1792),), (0, 0), None),
        ((1, 1), ((256, 256),), (0, 0), None),
    ]:
        plan = family.resize.plan(size, "auto", 16_384)
        assert (plan.sizes, plan.tiles, plan.thumbnail) == (sizes, tiles, thumbnail)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl", "glm4v"])
def test_qwen_marks_are_replaced_in_place(model_type: str):
    family = rule(model_type, image_token_id=IMAGE)
    ids, spans = Expander(family, Letters()).expand([1, IMAGE, 2, IMAGE], [prepared(family, (64, 96))] * 2)
    count = spans[0].num_tokens
    assert ids == [1, *[IMAGE] * count, 2, *[IMAGE] * count]
    assert spans[0].grid[1] * spans[0].grid[2] == count


def test_gemma4_marks():
    family = rule("gemma4", image_token_id=IMAGE, boi_token_id=5, eoi_token_id=6)
    ids, [span] = Expander(family, Letters()).expand([1, IMAGE, 2], [prepared(family, (100, 100))])
    assert ids == [1, 5, *[IMAGE] * span.num_tokens, 6, 2]
    assert (span.begin, span.grid) == (2, (1, 16, 16))


@given(st.lists(st.text("ab\n", max_size=7), min_size=2, max_size=4))
@example(["a\n\n\n\n", "\n\n\n\nb"])
def test_gemma3_newlines_join_those_of_the_prompt(texts: list[str]):
    """The ids equal the tokenizer's for the text with the images' tokens."""
    vocabulary = Letters("a", "b", "<image>", "<boi>", "<eoi>")
    image, boi, eoi = (vocabulary.tokens.index(token) for token in ("<image>", "<boi>", "<eoi>"))
    family = rule(
        "gemma3", image_token_index=image, boi_token_index=boi, eoi_token_index=eoi, mm_tokens_per_image=4,
        vision_config={"image_size": 56},
    )  # fmt: skip
    images = [prepared(family, (5, 9))] * (len(texts) - 1)
    ids, spans = Expander(family, vocabulary).expand(vocabulary.encode("<boi>".join(texts)), images)
    assert ids == vocabulary.encode(f"\n\n<boi>{'<image>' * 4}<eoi>\n\n".join(texts))
    assert [ids[span.begin : span.end] for span in spans] == [[image] * 4] * len(images)


@pytest.mark.parametrize(("num_marks", "num_images"), [(2, 1), (0, 1), (1, 0), (1, 2)])
def test_other_number_of_marks_is_refused(num_marks: int, num_images: int):
    vocabulary = Letters("a", "b", "c", "d", "<image>")
    family = rule("qwen3_5", image_token_id=IMAGE)
    with pytest.raises(CallboardError, match=rf"has {num_marks} image marks \(<image>\) for {num_images} images"):
        Expander(family, vocabulary).expand([IMAGE] * num_marks, [prepared(family, (64, 64))] * num_images)


def test_text_without_images_is_unchanged():
    family = rule("gemma3", boi_token_index=5)
    assert Expander(family, Letters()).expand([1, 2, 0], []) == ([1, 2, 0], ())


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["mistral3", "smolvlm", "qwen3_5", "qwen2_vl", "glm4v", "gemma3", "gemma4", "lfm2_vl", "internvl"]),
    st.integers(1, 6000),
    st.integers(1, 6000),
    st.sampled_from(["low", "auto", "high", "original"]),
    st.sampled_from([1120, 4096, 16_384]),
)
def test_any_size_has_whole_embeddings_within_the_limit(
    model_type: str, height: int, width: int, detail: Detail, most: int
):
    if max(height, width) > 200 * min(height, width):
        return
    family = rule(model_type, vision_config={"patch_size": 16 if model_type in ("smolvlm", "lfm2_vl") else 14})
    plan = family.resize.plan((height, width), detail, most)
    assert all(side > 0 and side % family.unit == 0 for part in plan.parts for side in part)
    tiles = plan.tiles[0] * plan.tiles[1] + (plan.thumbnail is not None)
    assert len(plan.parts) == max(1, tiles)
    if detail != "original":
        assert 0 < family.num_embeddings(plan.parts) <= most
