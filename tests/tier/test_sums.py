"""The checksum of payloads: its definition in plain integers, and the damage it finds."""

import sys
import time
from threading import Event, Thread

import numpy as np
import pytest

from runtime.tier.sums import payload_sums

MASK = 2**64 - 1


def plain_sum(payload: bytes, key: bytes) -> int:
    total = 0
    for i in range(len(payload) // 8):
        weight = (i * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & MASK | 1
        total += weight * int.from_bytes(payload[8 * i : 8 * i + 8], "little")
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    return (total & MASK) ^ low ^ (high << 32 & MASK | high >> 32)


@pytest.fixture
def rows() -> tuple[np.ndarray, bytes]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (5, 4096), np.uint8), random.bytes(5 * 16)


def test_the_sum_equals_its_definition(rows):
    payload, keys = rows
    expected = [plain_sum(row.tobytes(), keys[16 * i : 16 * i + 16]) for i, row in enumerate(payload)]
    assert payload_sums(payload, keys).tolist() == expected


def test_every_flipped_bit_is_found(rows):
    payload, keys = rows[0][:1, :64].copy(), rows[1][:16]
    right = payload_sums(payload, keys)
    for bit in range(64 * 8):
        payload[0, bit // 8] ^= 1 << bit % 8
        assert payload_sums(payload, keys) != right
        payload[0, bit // 8] ^= 1 << bit % 8


def test_another_key_does_not_fit(rows):
    payload, keys = rows
    assert not (payload_sums(payload, keys) == payload_sums(payload, keys[16:] + keys[:16])).any()


def test_exchanged_words_are_found(rows):
    payload, keys = rows
    words = payload.view(np.uint64).copy()
    words[:, [3, 9]] = words[:, [9, 3]]
    assert not (payload_sums(words.view(np.uint8), keys) == payload_sums(payload, keys)).any()


def test_sums_let_other_threads_run():
    """Unless a sum releases Python's lock, this thread waits until the other one gives up."""
    payload, begun, seen, gave_up = np.zeros((1, 1 << 20), np.uint8), Event(), Event(), Event()
    payload_sums(payload, bytes(16))  # makes the weights

    def add() -> None:
        begun.set()
        limit = time.monotonic() + 10
        while not seen.is_set() and time.monotonic() < limit:
            payload_sums(payload, bytes(16))
        if not seen.is_set():
            gave_up.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = Thread(target=add)
        thread.start()
        begun.wait()
        runs_meanwhile = not gave_up.is_set()
        seen.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert runs_meanwhile
