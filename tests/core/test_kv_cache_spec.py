"""The description of a KV cache determines its sizes, and the blocks that a window no longer needs."""

import pytest

from runtime.spec.decoder_spec import DecoderSpec
from runtime.spec.kv_cache_spec import KVCacheSpec, KVGroupSpec

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
    spec = DecoderSpec(
        num_layers=3, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=4, ffn_size=8, vocab_size=9,
        max_positions=64, norm_eps=1e-5, window=8, sliding=(True, False, True),
    )  # fmt: skip
    kv_cache = spec.kv_cache("float16")
    assert kv_cache.bytes_per_block(16) == 16 * 2 * 3 * 2 * 4 * 2
    (group,) = kv_cache.groups
    assert (group.layers, group.window) == ((0, 1, 2), None), "sliding layers keep everything, too"
