"""Assistants of Gemma 4: their drafts against transformers', the target's tokens, and refusals."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.library.models import assistant_head, spec_of
from runtime.assembly.runner import build_runner
from runtime.base.config import HEAD, EngineConfig
from runtime.base.types import CallboardError
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.kernels.cpu_support import obstacle
from runtime.loading.resolve import with_known_draft
from runtime.models.heads.assistant import CENTROID_ORDER, LAST_KEY_POSITION, POST, PRE
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from runtime.worker.warmup import WarmUp
from tests.support.models.assistant_models import MODELS, VOCAB, oracle, random_pair, write_pair
from tests.support.models.head_steps import HeadDriver
from tests.support.models.headed_runner import Rounds
from tests.support.ranks.rank_threads import on_ranks

BACKENDS = ["torch", pytest.param("auto", marks=pytest.mark.skipif(obstacle() != "", reason=obstacle()))]


def prompt(length: int, salt: int = 0) -> list[int]:
    return np.random.default_rng([length, salt]).integers(0, VOCAB, length).tolist()


def open_pair(model: Path, head: Path | None, **config) -> ModelRunner:
    own = {"device": "cpu", "num_kv_blocks": 80, "max_num_seqs": 4, "max_model_len": 96, "num_threads": 1}
    own |= {"dtype": "float32", "block_size": 8, "draft": None if head is None else f"{HEAD}{head}"}
    with mock.patch.object(WarmUp, "build_kernels"), mock.patch.object(ModelRunner, "_time_steps"):
        return build_runner(EngineConfig(**own | config), CheckpointSource(model))


class Drafted:
    """Keeps the logits of a runner's draft tokens, and compares a round's with the oracle's."""

    def __init__(self, runner: ModelRunner, want) -> None:
        self.rounds, self.want, self.kept = Rounds(runner), want, []
        head = runner.steps.head.head
        self.compute = head.logits
        head.logits = self.logits

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.kept.append(self.compute(x, out).clone())
        return self.kept[-1].clone()

    def check(self, *slots: int, count: int) -> None:
        """Compare the last `count` passes, which drafted for these rows."""
        made, self.kept = self.kept[-count:], []
        for row, slot in enumerate(slots):
            drafts = self.rounds.drafts(slot, count)
            want = self.want(self.rounds.known[slot], drafts)
            for got, one, draft in zip(made, want, drafts, strict=True):
                shown = got[row].isfinite()
                assert shown.sum() in (VOCAB, 3 * VOCAB // 16)
                torch.testing.assert_close(got[row][shown], one[shown], rtol=1e-3, atol=1e-3)
                assert one.argmax() == draft
                assert one[shown].std() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("centroids", [False, True], ids=["dense", "centroids"])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_those_of_the_oracle(name, centroids, backend, tmp_path):
    """Within the window and behind it, after chunks, hits and rejected draft tokens, in batches."""
    model, head = random_pair(name, centroids)
    runner = open_pair(*write_pair(tmp_path, model, head), kernel_backend=backend)
    drafted = Drafted(runner, partial(oracle, model, head))
    rounds = drafted.rounds
    rounds.prefill(0, prompt(1), drafts=3)
    drafted.check(0, count=3)
    rounds.prefill(1, prompt(61), cuts=(7, 40), drafts=2)
    drafted.check(1, count=2)
    for _ in range(2):
        rounds.verify(1, 0, given=2, drafts=3)
        drafted.check(1, 0, count=3)
    shared = rounds.driver.tables[1][:5]
    rounds.prefill(2, [*rounds.known[1][:40], *prompt(3, 1)], start=40, shared=shared, drafts=3)
    drafted.check(2, count=3)


def test_a_pass_may_have_the_position_of_its_last_key(tmp_path):
    model, head = random_pair("shared", centroids=False)
    runner = open_pair(*write_pair(tmp_path, model, head, **{LAST_KEY_POSITION: True}))
    drafted = Drafted(runner, partial(oracle, model, head, shift=-1))
    drafted.rounds.prefill(0, prompt(30), drafts=3)
    drafted.check(0, count=3)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(drafted.want(prompt(30), [1]), oracle(model, head, prompt(30), [1]))


def test_rows_may_lie_in_the_order_of_centroids(tmp_path):
    model, head = random_pair("shared", centroids=True)
    drafted = partial(oracle, model, head)
    want = drafted(prompt(9), [1, 2])
    table = head.model.embed_tokens.weight.data
    head.model.embed_tokens.weight.data = table[head.masked_embedding.token_ordering]
    assert not torch.allclose(drafted(prompt(9), [1, 2]), want), "the order matters"
    runner = open_pair(*write_pair(tmp_path, model, head, **{CENTROID_ORDER: True}))
    head.model.embed_tokens.weight.data = table
    kept = Drafted(runner, drafted)
    kept.rounds.prefill(0, prompt(30), drafts=3)
    kept.check(0, count=3)


@pytest.mark.parametrize("centroids", [False, True], ids=["dense", "centroids"])
def test_two_ranks_draft_as_one(centroids, tmp_path):
    model, head = random_pair("experts", centroids)
    paths, tokens = write_pair(tmp_path, model, head), prompt(20)
    source, draft = CheckpointSource(paths[0]), f"{HEAD}{paths[1]}"

    @torch.inference_mode()
    def logits(ranks: Communicator) -> torch.Tensor:
        driver, last = HeadDriver(source, ranks, draft), len(tokens) - 1
        hidden, _ = driver.target(tokens)
        x = driver.extend([5], last, hidden[-1:])
        again = driver.extend([9], last, driver.head.recycled(x))
        out = torch.empty(2, len(driver.head.spec.decoder.token_ids))
        return driver.head.logits(torch.cat((x, again)), out)

    want = oracle(model, head, [*tokens, 5], [9, 0])
    for found in (logits(OneRank()), torch.cat(on_ranks(2, logits), 1)):
        shown = found.isfinite()
        torch.testing.assert_close(found[shown], want[shown], rtol=1e-3, atol=1e-3)


def test_layers_read_the_targets_memory(tmp_path):
    runner = open_pair(*write_pair(tmp_path, *random_pair("shared", centroids=True)), kv_cache_dtype="int8")
    layers = runner.steps.cache.layers
    assert [(kv.values.data_ptr(), kv.scales.data_ptr()) for kv in layers[6:]] == [
        (kv.values.data_ptr(), kv.scales.data_ptr()) for kv in (layers[1], layers[1], layers[1], layers[2])
    ]
    assert runner.memory.feature_bytes == 0
    rounds = Rounds(runner)
    rounds.prefill(0, prompt(30), drafts=3)
    assert min(rounds.drafts(0, 3)) >= 0


def test_a_head_that_is_not_finite_spoils_no_block(tmp_path):
    runner = open_pair(*write_pair(tmp_path, *random_pair("shared", centroids=True)))
    rounds, head = Rounds(runner), runner.steps.head.head
    with mock.patch.object(head, "forward", lambda batch, hidden, caches: torch.full((len(hidden), 24), torch.nan)):
        rounds.prefill(0, prompt(9), drafts=3)
    assert rounds.drafts(0, 3) == [-1] * 3
    assert not runner.steps.poisoned


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"backbone_hidden_size": 48}, "hidden size of 48; the target's is 32"),
        ({"vocab_size": 256}, "vocabulary of 256; the target's is 128"),
        ({"num_key_value_heads": 1}, "reads 1 heads of keys and values in the target's layer 1, which has 2"),
        ({"head_dim": 8}, "reads 8 elements a head in the target's layer 1, which has 16"),
        ({"sliding_window": 20}, "reads 20 tokens of a window in the target's layer 1, which has 24"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"num_centroids": 17}, "num_centroids is 17"),
        ({"centroid_intermediate_top_k": 17}, "centroid_intermediate_top_k 17"),
        ({"text_config": None}, "text_config is 'None'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(fields, words, tmp_path):
    model, head = write_pair(tmp_path, *random_pair("shared", centroids=True))
    config = json.loads((head / "config.json").read_text())
    for name, value in fields.items():
        place = config["text_config"] if name in config["text_config"] and name != "tie_word_embeddings" else config
        place[name] = value
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(CallboardError, match=words):
        CheckpointSource(model).head(f"{HEAD}{head}")


def test_another_target_is_refused():
    with pytest.raises(CallboardError, match="layers with a window"):
        assistant_head(replace(spec_of("llama-3.1-8b"), vocab_size=262144))
    with pytest.raises(CallboardError, match="heads of keys and values"):
        assistant_head(spec_of("gemma-4-e2b"))


def test_an_order_that_names_a_token_twice_is_refused(tmp_path):
    model, head = random_pair("shared", centroids=True)
    head.masked_embedding.token_ordering[3] = head.masked_embedding.token_ordering[4]
    with pytest.raises(CallboardError, match="token_ordering does not name each"):
        open_pair(*write_pair(tmp_path, model, head))


def test_a_missing_tensor_is_refused(tmp_path):
    paths = write_pair(tmp_path, *random_pair("shared", centroids=False))
    file = paths[1] / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if not k.startswith("post_projection")}, file)
    with pytest.raises(CallboardError, match=r"post_projection\.weight"):
        open_pair(*paths)


def test_a_folder_is_known_as_a_heads(tmp_path):
    _, head = write_pair(tmp_path, *random_pair("shared", centroids=False))
    config = EngineConfig(draft=str(head))
    assert with_known_draft(config).draft == f"{HEAD}{head}"
    for device in ("own", "cpu"):
        with pytest.raises(CallboardError, match=f"draft_device is {device}"):
            with_known_draft(replace(config, draft_device=device))


def test_a_drawn_assistant_has_the_published_shapes():
    """Those of google/gemma-4-26B-A4B-it-assistant."""
    spec = assistant_head(spec_of("gemma-4-26b-a4b"))
    shapes = spec.decoder.shapes()
    assert (shapes[PRE], shapes[POST]) == ((1024, 5632), (2816, 1024))
    assert [shapes[f"layers.{i}.q.weight"][0] for i in range(4)] == [4096, 4096, 4096, 8192]
    assert shapes["layers.0.up.weight"] == (8192, 1024)
    assert [layer.mixer.kv_source for layer in spec.layers] == [28, 28, 28, 29]
    assert not any(".k" in name or ".v" in name for name in shapes)
