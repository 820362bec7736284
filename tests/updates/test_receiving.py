"""What a runner stages: the slices that it needs, of tensors that fit the model; or nothing of a part."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.base.weight_parts import ArraysPart, BroadcastPart, FilesPart, GroupInfo, IpcPart, PullPart, TensorInfo
from runtime.kernels.numerics import Numerics
from runtime.worker.memory import plan_memory
from runtime.worker.runner import ModelRunner
from tests.support.models.family_cases import save_model, spec_of
from tests.support.models.runner_driver import TINY, open_runner, tiny_runner
from tests.support.models.weight_updates import (
    changed,
    infos,
    logits,
    pull_part,
    random_tensors,
    tensors_in,
    update,
    write_changed,
    write_tiny,
)

LIMITS = {"deterministic": True, "max_model_len": 64, "kernel_backend": "torch"}
NORM, Q = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return open_runner(folder, weight_updates=True, **LIMITS)


def faulty_parts(tensors, path):
    """Parts that cannot be staged -> words of the error. The first tensors of each are in order."""
    first, other = {NORM: tensors[NORM]}, tensors[Q]
    wrong_shape, wrong_type = {Q: other[:3]}, {Q: other.to(torch.int32)}
    save_file(first | wrong_shape, path / "shape.safetensors")
    save_file(tensors, path / "whole.safetensors")
    data = (path / "whole.safetensors").read_bytes()
    (path / "cut.safetensors").write_bytes(data[:-100])
    (path / "text.safetensors").write_text("no weights")
    (path / "empty").mkdir()

    def too_few(slices):
        return [tensors[slices[0][0]]]

    def fails(slices):
        raise CallboardError("The trainer is gone.")

    return [
        (ArraysPart(first | wrong_shape), r"q_proj.* shape \[3, 32\]; the model has \[64, 32\]"),
        (ArraysPart(first | wrong_type), "q_proj.* is int32"),
        (ArraysPart(first | {"model.layers.9.mlp.up_proj.weight": other}), "no tensor model.layers.9"),
        (FilesPart([str(path / "shape.safetensors")]), "q_proj"),
        (FilesPart([str(path / "whole.safetensors"), str(path / "cut.safetensors")]), "cut.safetensors.*cut off"),
        (FilesPart([str(path / "text.safetensors")]), "damaged"),
        (FilesPart([str(path / "absent.safetensors")]), "cannot be read"),
        (FilesPart([str(path / "empty")]), "has no"),
        (FilesPart([str(path / "model.bin")]), "neither"),
        (PullPart(infos(first | {Q: other}), too_few), "1 tensors for 2 slices"),
        (PullPart(infos({NORM: tensors[NORM]}), lambda slices: [tensors[NORM][:3]]), r"\[3\].*announced.*\[32\]"),
        (PullPart(infos(tensors), fails), "gone"),
        (IpcPart([TensorInfo(NORM, "float32", (32,))], [{}]), "on a CPU"),
        (BroadcastPart([TensorInfo(NORM, "float32", (32,))]), "on a CPU"),
    ]


def test_nothing_of_a_faulty_part_is_staged(runner, folder, tmp_path):
    second = changed(tensors_in(folder))
    before = logits(runner)
    for part, words in faulty_parts(second, tmp_path):
        with pytest.raises(CallboardError, match=words):
            runner.updates.receive(part)
        with pytest.raises(CallboardError, match="no tensor"):
            runner.updates.check()
    assert torch.equal(logits(runner), before)
    with pytest.raises(CallboardError, match="on a CPU"):
        runner.updates.connect(GroupInfo(1, 2))
    runner.updates.disconnect()
    update(runner, [ArraysPart(second)])
    assert torch.equal(logits(runner), logits(open_runner(write_changed(folder, second, tmp_path / "b"), **LIMITS)))


def test_a_discarded_update_leaves_the_old_weights(runner, folder):
    before = logits(runner)
    runner.updates.receive(ArraysPart(changed(tensors_in(folder))))
    runner.updates.discard()
    with pytest.raises(CallboardError, match="no tensor"):
        runner.updates.check()
    assert torch.equal(logits(runner), before)


def test_discard_ends_a_receive_in_another_thread(runner, folder):
    tensors, began, errors = tensors_in(folder), threading.Event(), []
    ended = threading.Event()

    def pull(slices):
        began.set()
        assert ended.wait(60)
        return [tensors[name] for name, *_ in slices]

    def receive():
        try:
            runner.updates.receive(PullPart(infos(tensors), pull))
        except CallboardError as e:
            errors.append(str(e))

    thread = threading.Thread(target=receive)
    thread.start()
    assert began.wait(60)
    runner.updates.discard()
    ended.set()
    thread.join()
    assert "dropped" in errors[0]
    with pytest.raises(CallboardError, match="no tensor"):
        runner.updates.check()


def test_names_may_lack_or_have_wrappers(tmp_path):
    save_model(tmp_path / "first", "gemma3, with a vision tower")
    second = changed(tensors_in(tmp_path / "first"))
    want = logits(open_runner(write_changed(tmp_path / "first", second, tmp_path / "second"), **LIMITS))
    text = {name: tensor for name, tensor in second.items() if "vision" not in name and "projector" not in name}
    for change in (
        lambda name: name.replace("language_model.", "").removeprefix("model."),
        lambda name: "model." + name,
        lambda name: name.replace("model.", "", 1),
    ):
        runner = open_runner(tmp_path / "first", weight_updates=True, **LIMITS)
        update(runner, [ArraysPart({change(name): tensor for name, tensor in text.items()})])
        assert torch.equal(logits(runner), want)


@pytest.mark.parametrize("case", ["mixtral", "qwen3 moe", "qwen3.5 moe"])
def test_experts_come_stacked_or_one_by_one(case, tmp_path):
    save_model(tmp_path / "first", case)
    second = changed(tensors_in(tmp_path / "first"))
    want = logits(open_runner(write_changed(tmp_path / "first", second, tmp_path / "second"), **LIMITS))
    for tensors in (one_by_one(second), stacked(one_by_one(second))):
        runner = open_runner(tmp_path / "first", weight_updates=True, **LIMITS)
        assert update(runner, [pull_part(tensors)]).serial == 1
        assert torch.equal(logits(runner), want)


def one_by_one(tensors):
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for i, own in enumerate(tensor):
                gate, up = own.chunk(2)
                found |= {f"{name[:-13]}.{i}.gate_proj.weight": gate, f"{name[:-13]}.{i}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found |= {f"{name[:-10]}.{i}.down_proj.weight": own for i, own in enumerate(tensor)}
        else:
            found[name] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def stacked(tensors):
    found, groups = {}, {}
    for name, tensor in tensors.items():
        prefix, is_expert, rest = name.partition(".experts.")
        if not is_expert or not rest.split(".")[0].isdigit() or "gate_proj" not in "".join(tensors):
            found[name] = tensor
        else:
            index, part = rest.split(".")[:2]
            groups.setdefault(prefix, {})[int(index), part] = tensor
    for prefix, own in groups.items():
        count = 1 + max(i for i, _ in own)
        gate_up = [torch.cat((own[i, "gate_proj"], own[i, "up_proj"])) for i in range(count)]
        found[f"{prefix}.experts.gate_up_proj"] = torch.stack(gate_up)
        found[f"{prefix}.experts.down_proj"] = torch.stack([own[i, "down_proj"] for i in range(count)])
    return found


def test_a_copy_of_a_tied_head_is_skipped(tmp_path):
    folder = write_tiny(tmp_path / "first", tie_word_embeddings=True)
    second = changed(tensors_in(folder))
    want = logits(open_runner(write_changed(folder, second, tmp_path / "second"), **LIMITS))
    runner = open_runner(folder, weight_updates=True, **LIMITS)
    copy = {"lm_head.weight": second["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq": Q}
    copy["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert update(runner, [ArraysPart(second | copy)]).identity
    assert torch.equal(logits(runner), want)


def test_floats_of_another_width_are_converted(runner, folder, tmp_path):
    second = {name: tensor.bfloat16() for name, tensor in changed(tensors_in(folder)).items()}
    want = logits(open_runner(write_changed(folder, second, tmp_path / "second"), **LIMITS))
    update(runner, [ArraysPart(second)])
    assert torch.equal(logits(runner), want)


def test_random_weights_take_whole_updates(folder):
    runner = tiny_runner(spec_of("llama"), weight_updates=True)
    update(runner, [ArraysPart(drawn := random_tensors(runner))])
    assert runner.info.weights.serial == 1
    update(runner, [ArraysPart({NORM: drawn[NORM] + 1})])
    fresh = tiny_runner(TINY, weight_updates=True)
    fresh.updates.receive(ArraysPart({NORM: random_tensors(fresh)[NORM]}))
    with pytest.raises(CallboardError, match="random"):
        fresh.updates.check()


def test_a_runner_without_updates_says_so(folder):
    runner = open_runner(folder, **LIMITS)
    assert runner.updates is None
    assert runner.info.weights is None
    with pytest.raises(CallboardError, match="weight_updates"):
        runner.update_weights(None)


def test_a_plan_for_a_gpu_has_room_for_new_weights():
    numerics = Numerics(torch.bfloat16, torch.device("cuda", 0), "triton", packed=False, deterministic=False)
    config = EngineConfig(weight_updates=True, max_model_len=64).sized_for("cuda")
    plan = plan_memory(config, TINY, numerics, 1 << 36)
    assert plan.updates > plan.weights
    without = plan_memory(EngineConfig(max_model_len=64).sized_for("cuda"), TINY, numerics, 1 << 36)
    assert without.updates == 0
    assert "new weights" in str(plan)
    assert "new weights" not in str(without)
    needed = without.weights + without.kv + without.working + without.graphs
    fixed = replace(config, num_kv_blocks=without.num_kv_blocks)
    plan_memory(replace(fixed, weight_updates=False), TINY, numerics, needed)
    with pytest.raises(CallboardError, match=r"serve without weight_updates, lower num_kv_blocks.*GiB are missing"):
        plan_memory(fixed, TINY, numerics, needed)
