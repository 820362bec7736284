"""Prompts with pictures for a model with a head. The head sees their tokens as text, and changes no answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.library.models import eagle3_head
from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Speculation
from runtime.speculation.head_drafter import HeadDrafter
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource, DummySource, ModelSource
from runtime.worker.warmup import WarmUp
from tests.support.engine.fake_runner import FixedShare
from tests.support.models.family_cases import random_model
from tests.support.models.headed_files import bring_near
from tests.support.models.mtp_models import head_beside, head_tensors, write_model
from tests.support.models.specs import dense_spec
from tests.support.models.tiny_images import span_of, tiny_tower
from tests.support.models.tower_cases import CASES, IMAGE

TIGHT = {"num_kv_blocks": 16, "max_num_batched_tokens": 80, "max_num_seqs": 6}
WHOLE = dense_spec(  # an image's tokens see each other, like Gemma 3's
    num_layers=4, hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=80, vocab_size=131,
    max_positions=256, norm_eps=1e-6, window=(24, 24, 0, 24), tied_head=True, whole_images=True,
)  # fmt: skip


def qwen(folder: Path) -> CheckpointSource:
    """A tiny Qwen3.5 with its image encoder and its head: rotary positions have sections, and layers states."""
    import transformers

    case = CASES["qwen3.5"]
    model = random_model(case.model_class, getattr(transformers, case.kind)(**case.config))
    text = model.model.language_model
    head = head_beside(text, text.config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    bring_near(text, head, is_offset=True)
    model.get_output_embeddings().weight.data[IMAGE] = 0.0
    return CheckpointSource(write_model(folder, model, head_tensors("qwen3.5", head, False)))


def runner(source: ModelSource, **config: Any) -> ModelRunner:
    own = {"device": "cpu", "dtype": "float32", "num_threads": 1, "deterministic": True, "max_num_seqs": 8}
    own |= {"num_kv_blocks": 300, "max_model_len": 192, "block_size": 16}
    with mock.patch.object(WarmUp, "build_kernels"), mock.patch.object(ModelRunner, "_time_steps"):
        return build_runner(EngineConfig(**own | config), source)


def request(i: int, vocab_size: int, image_id: int) -> Request:
    """A prompt with up to two images. Their places vary against blocks and chunks."""
    rng = np.random.default_rng(i)
    spans = (span_of(3 + i, i % 4, 2, 3), span_of(30 + 2 * i, 9, 3, 1 + i % 5))[: i % 3]
    length = (spans[-1].end if spans else 0) + 3 + 5 * (i % 7)
    tokens = rng.integers(2, vocab_size if image_id < 2 else image_id, length)
    for span in spans:
        tokens[span.begin : span.end] = image_id
    params = SamplingParams(max_tokens=32, temperature=0.5 * (i % 3), top_k=30 * (i % 2), logprobs=1)
    return Request(str(i), tokens.tolist(), len(tokens), params, seed=i, images=spans)


def answers(model: ModelRunner, count: int = 24) -> tuple[dict[str, list[Any]], Any]:
    """Tokens and log-probabilities, and the engine's figures."""
    drafts = None if model.info.head is None else Speculation(HeadDrafter(model.info.head), 3, (), 0.0)
    core = build_engine(model.config, model.info, InProcess(model), drafts)
    core.extras[Admission].lengths = FixedShare(0.1)
    found: dict[str, list[Any]] = {str(i): [] for i in range(count)}
    for i in range(count):
        core.add(request(i, model.info.vocab_size, model.info.images.token_id))
    while core.has_work:
        if (output := core.step()) is not None:
            for at, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
                found[state.request.request_id].append((token, output.logprobs[at]))
        assert core.scheduler.find_faults() == []
    return found, core.scheduler.stats


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("config", [TIGHT, {"max_num_seqs": 1}, {}], ids=["tight", "alone", "burst"])
def test_pictures_have_the_same_answers(config, tmp_path):
    source = qwen(tmp_path)
    want, _ = answers(runner(source))
    got, stats = answers(runner(source, draft="mtp", **config))
    assert got == want
    assert 24 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.images_encoded > 0
    assert stats.preemptions > 0 or config is not TIGHT


@pytest.mark.long
def test_whole_images_have_the_same_answers():
    """A row of the head ends one position later, which may be within an image. A published head is causal."""
    head = replace(eagle3_head(WHOLE, 60), taps=(0, 1, 3))
    (layer,) = head.layers
    layer = replace(layer, mixer=replace(layer.mixer, whole_images=False))
    head = replace(head, decoder=replace(head.decoder, layers=(layer,)))
    source = DummySource(WHOLE, tower=tiny_tower(48), draft_head=head)
    want, _ = answers(runner(source))
    got, stats = answers(runner(source, draft="mtp", **TIGHT | {"num_kv_blocks": 70}))
    assert got == want
    assert stats.draft_tokens > 0
    assert stats.preemptions > 0
