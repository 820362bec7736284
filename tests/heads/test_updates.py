"""Updates of a model with a head: they change the head if they bring its tensors, and no update fails by its head."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError, Request, SamplingParams
from runtime.base.weight_parts import ArraysPart
from runtime.core.executor import InProcess
from runtime.models.heads.head import DraftHead
from runtime.speculation.choose_k import Speculation
from runtime.speculation.head_drafter import HeadDrafter
from runtime.updates.apply import taken
from runtime.updates.in_place import tensors_of
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from runtime.worker.warmup import WarmUp
from tests.support.models.headed_files import near_pair
from tests.support.models.mtp_models import head_tensors, write_model
from tests.support.models.weight_updates import changed, pull_part, tensors_in, update, write_changed

BACKENDS = ["torch", "auto"]
MODELS = ["qwen3.5", "qwen3.5-moe", "glm4-moe", "deepseek-v3"]


def write(folder: Path, name: str, stacked: bool = False) -> Path:
    model, head = near_pair(name)
    return write_model(folder, model, head_tensors(name, head, stacked))


def is_heads(name: str) -> bool:
    return name.startswith(("mtp.", "model.layers.2."))


def start(folder: Path, **config: Any) -> ModelRunner:
    own = {"device": "cpu", "dtype": "float32", "num_threads": 1, "deterministic": True, "max_num_seqs": 4}
    own |= {"num_kv_blocks": 160, "max_model_len": 128, "block_size": 16, "draft": "mtp", "kernel_backend": "torch"}
    with mock.patch.object(WarmUp, "build_kernels"), mock.patch.object(ModelRunner, "_time_steps"):
        return build_runner(EngineConfig(**own | config), CheckpointSource(folder))


def answers(model: ModelRunner) -> tuple[dict[str, list[int]], list[int]]:
    """The tokens of some requests, and how many draft tokens were accepted at each position."""
    model.reset()
    drafts = None if model.info.head is None else Speculation(HeadDrafter(model.info.head), 3, (), 0.0)
    core, found = build_engine(model.config, model.info, InProcess(model), drafts), {}
    for i in range(6):
        tokens = [3 + (7 * i + 13 * k + i * k) % 250 for k in range(9 + 5 * i)]
        params = SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), ignore_eos=True)
        core.add(Request(str(i), tokens, len(tokens), params, seed=i))
    while core.has_work:
        if (output := core.step()) is not None:
            for state, token in zip(output.states, output.token_ids, strict=True):
                found.setdefault(state.request.request_id, []).append(token)
    return found, core.scheduler.stats.accepted_by_position


def weights(head: DraftHead) -> list[torch.Tensor]:
    """Copies of the tensors that are the head's own."""
    own = [each for name, part in vars(head).items() if name != "target" for each in tensors_of(part)]
    return [each.to_dense() if each.is_mkldnn else each.clone() for each in own]


def are_equal(one: DraftHead, other: DraftHead) -> bool:
    pairs = zip(weights(one), weights(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_an_update_is_a_start_with_its_weights(name, backend, tmp_path):
    folder, config = write(tmp_path / "first", name), {"kernel_backend": backend}
    second = changed(tensors_in(folder))
    fresh = start(write_changed(folder, second, tmp_path / "second"), **config)
    runner = start(folder, weight_updates=True, **config)
    want, old = answers(fresh), answers(runner)
    assert old[0] != want[0]
    before = weights(runner.head.head)
    update(runner, [pull_part(second)])
    assert runner.updates.draft_head == "updated"
    assert answers(runner) == want, "tokens, and the acceptance of each draft token"
    assert runner.steps.head.head is runner.head.head
    assert backend != "torch" or are_equal(runner.head.head, fresh.head.head)  # others have padding
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(runner.head.head), strict=True))


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_an_update_without_the_head_keeps_it(name, tmp_path):
    """Trainers often leave its tensors out. A start with the new weights and without a head gives the same tokens."""
    folder = write(tmp_path / "first", name)
    second = changed(tensors_in(folder))
    trunk = {key: tensor for key, tensor in second.items() if not is_heads(key)}
    runner = start(folder, weight_updates=True)
    before = weights(runner.head.head)
    version = update(runner, [ArraysPart(trunk)])
    assert runner.updates.draft_head == "kept"
    assert all(torch.equal(a, b) for a, b in zip(before, weights(runner.head.head), strict=True))
    plain = start(write_changed(folder, second, tmp_path / "second"), draft=None)
    assert answers(runner)[0] == answers(plain)[0]
    again = update(start(folder, weight_updates=True), [ArraysPart(trunk)])
    assert again.identity == version.identity, "an update without the head is a whole one"


def test_some_tensors_of_a_head_are_taken(tmp_path):
    folder = write(tmp_path / "first", "qwen3.5")
    second = changed(tensors_in(folder))
    some = {key: tensor for key, tensor in second.items() if key.startswith("mtp.layers.")}
    fresh = start(write_changed(folder, some, tmp_path / "second"))
    runner = start(folder, weight_updates=True)
    want = answers(fresh)
    assert answers(runner) != want
    update(runner, [ArraysPart(some)])
    assert runner.updates.draft_head == "partly"
    assert answers(runner) == want
    update(runner, [ArraysPart({"lm_head.weight": second["lm_head.weight"]})], "2")
    assert runner.updates.draft_head == "kept"


@pytest.mark.parametrize("name", ["qwen3.5-moe", "deepseek-v3"])
def test_experts_of_a_head_arrive_in_either_layout(name, tmp_path):
    folder, stacked = write(tmp_path / "single", name), write(tmp_path / "stacked", name, stacked=True)
    second, other = changed(tensors_in(folder)), changed(tensors_in(stacked))
    fresh = [start(write_changed(path, new, path.with_suffix(".2"))) for path, new in
             ((folder, second), (stacked, other))]  # fmt: skip
    for path, new, want in ((folder, other, fresh[1]), (stacked, second, fresh[0])):
        runner = start(path, weight_updates=True)
        update(runner, [ArraysPart(new)])
        assert runner.updates.draft_head == "updated"
        assert are_equal(runner.head.head, want.head.head)


def test_a_restart_has_the_stored_head(tmp_path):
    """Copies of the embedding do not follow an update, and are not compared with it."""
    model, head = near_pair("glm4-moe")
    tensors = head_tensors("glm4-moe", head, False)
    tensors["model.layers.2.embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    folder = write_model(tmp_path / "first", model, tensors)
    second = changed(tensors_in(folder))
    config = {"weight_updates": True, "weight_store": str(tmp_path / "store")}
    runner = start(folder, **config)
    update(runner, [ArraysPart(second)])
    runner.updates.store()
    want = answers(runner)
    restarted = start(folder, **config)
    assert restarted.updates.version == runner.updates.version
    assert are_equal(restarted.head.head, runner.head.head)
    assert answers(restarted) == want
    trunk = {key: tensor for key, tensor in changed(second, 1).items() if not is_heads(key)}
    update(restarted, [ArraysPart(trunk)], "2")
    assert restarted.updates.draft_head == "kept"
    assert are_equal(restarted.head.head, runner.head.head)


def test_a_head_in_fp8_is_kept(tmp_path):
    """Trainers send bfloat16. The head of the checkpoint drafts on; no update fails by it."""
    model, head = near_pair("qwen3.5")
    tensors = head_tensors("qwen3.5", head, False)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)
    tensors["mtp.fc.weight_scale_inv"] = torch.ones(1, 1)
    folder = write_model(tmp_path / "first", model, tensors)
    runner = start(folder, weight_updates=True)
    before = weights(runner.head.head)
    new = {key: tensor.bfloat16() for key, tensor in tensors_in(folder).items() if "fc.weight" in key}
    del new["mtp.fc.weight_scale_inv"]
    lm_head = {"lm_head.weight": torch.zeros_like(model.lm_head.weight)}
    update(runner, [ArraysPart(new | lm_head)])
    assert runner.updates.draft_head == "kept"
    assert all(torch.equal(a, b) for a, b in zip(before, weights(runner.head.head), strict=True))


def test_a_head_takes_weights_at_their_addresses(tmp_path):
    """As on a GPU, where graphs hold them."""
    folder, config = write(tmp_path / "first", "qwen3.5"), {"packed_weights": False, "deterministic": False}
    second = write_changed(folder, changed(tensors_in(folder)), tmp_path / "second")
    runner, other = start(folder, **config), start(second, **config)
    before, source = runner.head.head, CheckpointSource(second).checkpoint
    runner.head.follow(source, partial(taken, in_place=True))
    assert runner.head.head is runner.steps.head.head is before
    assert are_equal(before, other.head.head)


def test_a_wrong_shape_is_named(tmp_path):
    runner = start(write(tmp_path / "first", "qwen3.5"), weight_updates=True)
    with pytest.raises(CallboardError, match=r"mtp.fc.weight of the update has shape \[3, 3\]"):
        runner.updates.receive(ArraysPart({"mtp.fc.weight": torch.zeros(3, 3)}))


def test_a_model_without_a_head_reports_none(tmp_path):
    runner = start(write(tmp_path / "first", "qwen3.5"), weight_updates=True, draft=None)
    update(runner, [ArraysPart(tensors_in(tmp_path / "first"))])
    assert runner.updates.draft_head == ""
