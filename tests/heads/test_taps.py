"""Taps are the hidden states that enter layers, as transformers returns them."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.models.forward_batch import ForwardBatch, Taps
from runtime.worker.runner import ModelRunner
from tests.support.models.runner_driver import Driver, open_runner

LAYERS = (0, 2, 4)  # 4: what leaves the last layer


def tapped(runner: ModelRunner) -> list[torch.Tensor]:
    """Set taps in all later steps; the list receives their results."""
    found, forward = [], runner.decoder.forward

    def with_taps(batch: ForwardBatch, caches):
        batch.taps = Taps(LAYERS, torch.empty(len(batch.token_ids), len(LAYERS) * runner.decoder.spec.hidden_size))
        found.append(batch.taps.out)
        return forward(batch, caches)

    runner.decoder.forward = with_taps
    return found


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_taps_equal_hidden_states_of_transformers(backend, tmp_path: Path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=72, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    runner = open_runner(tmp_path, kernel_backend=backend)
    kept: list[torch.Tensor] = []
    hook = theirs.model.layers[-1].register_forward_hook(lambda _, inputs, out: kept.append(out))
    tokens = [5, 17, 80, 3, 44, 9]
    with torch.no_grad():
        states = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    last = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    expected = torch.cat([states[0][0], states[2][0], last.reshape(len(tokens), -1)], 1)

    driver = Driver(runner)
    found = tapped(runner)
    driver.open(0, tokens)
    driver.step((0, 0, 5, False))
    driver.step((0, 5, 1, True))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
    if (tapes := runner.steps.tapes) is not None:
        assert not tapes.takes(1)  # torch copies the taps, so that a tape would lack them
