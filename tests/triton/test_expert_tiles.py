"""Tiles of the choices of tokens: each choice stands in one tile of its expert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.experts import choice_tiles


@pytest.fixture(autouse=True)
def few_choices_in_a_row(monkeypatch: pytest.MonkeyPatch):
    """Several programs count and place."""
    monkeypatch.setattr(choice_tiles, "_COUNTED", 128)
    monkeypatch.setattr(choice_tiles, "_MOST_PARTS", 2)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.sampled_from((1, 8, 16, 128)), st.sampled_from((0.1, 1.0, 10.0)), st.integers(1, 400),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_each_choice_stands_in_one_tile_of_its_expert(
    num_experts: int, block_m: int, spread: float, num_choices: int, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    shares = torch.randn(num_experts, generator=generator).mul(spread).softmax(0)  # also of one expert alone
    ids = shares.multinomial(num_choices, replacement=True, generator=generator).int()
    experts, choices, done = choice_tiles.tiled(ids, num_experts, block_m)
    assert choices is not None
    assert done is not None
    assert not done.any()
    assert choices.shape == (len(experts), block_m)
    for expert in range(num_experts):
        own = choices[experts == expert]
        want = (ids == expert).nonzero().flatten()
        assert len(own) == -(-len(want) // block_m)
        assert torch.equal(own.flatten()[: len(want)], want.int())
        assert (own.flatten()[len(want) :] == -1).all()
    used = int((experts >= 0).sum())
    assert (experts[:used] >= 0).all()
    assert (experts[used:] == -1).all()
