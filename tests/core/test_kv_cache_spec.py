"""The description of a KV cache determines its sizes, and the blocks that a window no longer needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.base.kv_cache_spec import KVCacheSpec, KVGroupSpec
from runtime.base.model.kv_groups import MOST_GROUPS, window_groups
from tests.support.models.specs import dense_spec

FULL = KVGroupSpec((1, 3), num_kv_heads=4, head_dim=16, dtype="bfloat16")
WINDOW = KVGroupSpec((0, 2, 4), num_kv_heads=2, head_dim=16, dtype="int8", scale_dtype="float16", window=10)


def test_bytes_follow_from_layers_heads_and_dtype():
    assert FULL.bytes_per_token == 2 * 2 * 4 * 16 * 2
    assert WINDOW.bytes_per_token == 2 * 3 * 2 * (16 * 1 + 2)
    assert FULL.bytes_per_block(8) == 8 * FULL.bytes_per_token


def test_a_block_has_room_for_any_group():
    spec = KVCacheSpec((FULL, WINDOW))
    assert spec.bytes_per_block(8) == FULL.bytes_per_block(8) > WINDOW.bytes_per_block(8)
    assert spec.total_bytes(100, 8) == 100 * spec.bytes_per_block(8)
    assert spec.bytes_per_token == 2 * FULL.bytes_per_token
    assert spec.num_layers == 5
    assert [spec.place_of(layer) for layer in range(5)] == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2)]


@pytest.mark.parametrize("num_computed", range(40))
@pytest.mark.parametrize("window", [1, 4, 10])
def test_dead_blocks_hold_only_unattended_tokens(num_computed, window):
    group = KVGroupSpec((0,), 1, 16, "float32", window=window)
    first_read = max(0, num_computed - window + 1)  # by the token at position num_computed
    assert group.num_dead_blocks(num_computed, 4) == sum(4 * i + 3 < first_read for i in range(20))
    assert FULL.num_dead_blocks(num_computed, 4) == 0


def test_a_decoder_gives_its_kv_cache():
    spec = dense_spec(
        num_layers=3, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=4, ffn_size=8, vocab_size=9,
        max_positions=64, norm_eps=1e-5, window=(8, 0, 8),
    )  # fmt: skip
    kv_cache = spec.kv_cache("float16")
    assert kv_cache.bytes_per_block(16) == 16 * 2 * 3 * 2 * 4 * 2
    (group,) = kv_cache.groups
    assert (group.layers, group.window) == ((0, 1, 2), None), "sliding layers keep everything, too"


def groups_of(num_layers: int, sliding: frozenset[int], window: int, longest: int) -> tuple[KVGroupSpec, ...]:
    full = tuple(i for i in range(num_layers) if i not in sliding)
    parts = KVGroupSpec(full, 4, 64, "bfloat16"), KVGroupSpec(tuple(sliding), 4, 64, "bfloat16", window=window)
    return window_groups([part for part in parts if part.layers], longest)


@pytest.mark.parametrize(
    ("num_layers", "every", "window", "longest", "sizes"),
    [
        (26, 6, 512, 32768, [4] * 6 + [2]),  # Gemma 3 1B: 4 layers without a window, 22 with one
        (48, 6, 1024, 131072, [8] * 6),  # 12B
        (62, 6, 1024, 131072, [10, 11, 11, 11, 11, 8]),  # 27B: 10 and 52
        (26, 2, 4096, 8192, [13, 13]),  # Gemma 2 2B
        (24, 2, 128, 131072, [12, 12]),  # gpt-oss 20B
        (26, 6, 512, 512, [26]),  # the context ends with the window
        (26, 2, 4096, 4200, [26]),
    ],
)
def test_published_models_have_few_groups_of_equal_size(num_layers, every, window, longest, sizes):
    sliding = frozenset(i for i in range(num_layers) if (i + 1) % every)
    groups = groups_of(num_layers, sliding, window, longest)
    assert sorted(len(group.layers) for group in groups) == sorted(sizes)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(num_layers))
    if len(groups) > 1:
        assert all((group.window == window) == (layer in sliding) for group in groups for layer in group.layers)
        assert groups[0].window is None


def test_layers_that_all_slide_are_one_group():
    (group,) = groups_of(32, frozenset(range(32)), 4096, 32768)
    assert (group.layers, group.window) == (tuple(range(32)), 4096)


@given(st.integers(1, 70), st.data())
def test_groups_never_cost_much_more(num_layers, data):
    sliding = data.draw(st.frozensets(st.integers(0, num_layers - 1)))
    window, longest = data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 100000))
    groups = groups_of(num_layers, sliding, window, longest)
    assert 1 <= len(groups) <= MOST_GROUPS
    assert sorted(layer for group in groups for layer in group.layers) == list(range(num_layers))
    size = max(len(group.layers) for group in groups)
    assert len(groups) * size <= 1.1 * num_layers
    needed = sum(size * min(longest, group.window or longest) for group in groups)
    assert len(groups) == 1 or needed <= 0.9 * num_layers * longest
