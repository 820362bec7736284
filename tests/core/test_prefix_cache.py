"""Prefixes that all groups of a cache can continue, block hashes with images, and requests to reset the cache."""

from array import array
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from runtime.base.images import Image, ImageSpan
from runtime.base.kv_cache_spec import KVGroupSpec
from runtime.base.types import SamplingParams
from runtime.core.prefix_cache import PrefixCache, hash_blocks, match_tables, root_hash
from tests.support.engine.sessions import Session, first_plan


def test_a_reset_keeps_only_held_blocks():
    session = Session(block_size=4, max_num_batched_tokens=64)
    scheduler, prompt = session.core.scheduler, list(range(1, 14))
    session.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    session.finish()
    session.add(prompt[:9], SamplingParams(max_tokens=9, ignore_eos=True))
    session.step()
    assert len(scheduler.kv_cache.cache) == 3
    scheduler.pool.evict_unheld()
    assert (len(scheduler.kv_cache.cache), scheduler.find_faults()) == (2, [])
    session.finish()
    scheduler.pool.evict_unheld()
    assert (len(scheduler.kv_cache.cache), scheduler.find_faults()) == (0, [])
    session.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    assert first_plan(session).num_tokens.tolist() == [13]


@given(
    st.lists(st.tuples(st.sampled_from([None, None, 1, 3, 4, 7, 20]), st.sets(st.integers(0, 11))), min_size=1),
    st.integers(0, 12),
    st.sampled_from([1, 2, 4]),
)
def test_a_match_is_the_longest_prefix_that_all_groups_continue(groups, num_blocks, size):
    """Each group is its window and the blocks that are not cached."""
    specs = [KVGroupSpec((0,), 1, 8, "float32", window=window) for window, _ in groups]
    caches, path = [PrefixCache() for _ in groups], [bytes([i]) for i in range(num_blocks)]
    for cache, (_, missing) in zip(caches, groups, strict=True):
        kept = [i for i in range(num_blocks) if i not in missing]
        cache.insert([path[i] for i in kept], [i + 1 for i in kept])

    def needed(spec: KVGroupSpec, length: int) -> set[int]:
        return {i for i in range(length) if spec.window is None or (i + 1) * size > length * size - spec.window + 1}

    def continues(length: int) -> bool:
        return not any(needed(spec, length) & missing for spec, (_, missing) in zip(specs, groups, strict=True))

    longest = max(filter(continues, range(num_blocks + 1)))
    tables = match_tables(caches, specs, path, size)
    for spec, table in zip(specs, tables, strict=True):
        assert table == [i + 1 if i in needed(spec, longest) else 0 for i in range(longest)]


ROOT = root_hash("f", "")


@st.composite
def prompts(draw):
    """Tokens, and the spans of images in them. An image's digest decides its length."""
    spans, end = [], 0
    for gap, number in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=4)):
        image = Image(bytes([number]) * 16, ((2, 2),))
        spans.append(ImageSpan(end + gap, (1, 5, 20)[number], image))
        end = spans[-1].end
    token_ids = draw(st.lists(st.integers(0, 3), min_size=end, max_size=end + 20))
    return array("i", token_ids), spans


@given(prompts(), st.integers(1, 9))
def test_hashes_without_images_cover_the_tokens_alone(prompt, size):
    token_ids, _ = prompt
    parent, expected = ROOT, []
    for at in range(0, len(token_ids), size):
        parent = blake2b(token_ids[at : at + size].tobytes(), key=parent, digest_size=16).digest()
        expected.append(parent)
    assert hash_blocks(ROOT, token_ids, size) == expected


@given(prompts(), st.integers(1, 9), st.integers(0, 80))
def test_hashes_of_pieces_equal_those_of_the_whole(prompt, size, cut):
    (token_ids, spans), cut = prompt, cut // size * size
    whole, first = hash_blocks(ROOT, token_ids, size, spans), hash_blocks(ROOT, token_ids[:cut], size, spans)
    assert first == whole[: len(first)]
    parent = first[-1] if first else ROOT
    assert hash_blocks(parent, token_ids[cut:], size, spans, cut) == whole[len(first) :]


@given(prompts(), prompts(), st.integers(1, 9), st.booleans())
def test_blocks_are_equal_if_and_only_if_tokens_and_images_are(one, other, size, same_tokens):
    (tokens, spans), (others, other_spans) = one, other
    if same_tokens:
        others = tokens
        other_spans = [span for span in other_spans if span.end <= len(tokens)]

    def seen(token_ids, spans):
        """Return each position's token, and its place in an image."""
        parts = {at: (s.image.digest, at - s.begin) for s in spans for at in range(s.begin, s.end)}
        return [(token, parts.get(at)) for at, token in enumerate(token_ids)]

    first, second = seen(tokens, spans), seen(others, other_spans)
    hashes = hash_blocks(ROOT, tokens, size, spans), hash_blocks(ROOT, others, size, other_spans)
    for number in range(min(len(tokens), len(others)) // size):
        end = (number + 1) * size
        assert (hashes[0][number] == hashes[1][number]) == (first[:end] == second[:end])
