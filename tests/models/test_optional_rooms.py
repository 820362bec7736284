"""A runner's optional rooms: each can be deleted with its lines of assembly, and the model decodes the same tokens."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from runtime.assembly.runner import build_runner
from runtime.base.model.mixer_spec import ShortConvSpec
from runtime.base.types import CallboardError
from runtime.models import decoder_build
from runtime.worker.sources import DummySource
from tests.models.test_runner_extras import CONFIG
from tests.support.models.specs import TINY, changed
from tests.support.pruned_tree import ROOT, copy_tree, output_of

RUNNER = "runtime/assembly/runner.py"


class Room(NamedTuple):
    """An optional part of a runner."""

    paths: tuple[str, ...]
    assembly: tuple[tuple[str, str], ...] = ()  # (file, name): all lines with this name are deleted, with their import


TIER = "acks", "copies", "gpu_copies", "pinning", "runner_tier"
ROOMS = {
    "adapters": Room(
        ("runtime/features/adapter_weights.py", "runtime/models/lora.py"),
        ((RUNNER, "RunnerAdapters"),),
    ),
    "weight updates": Room(("runtime/updates",), ((RUNNER, "RunnerUpdates"),)),
    "speculation": Room(("runtime/speculation",), ((RUNNER, "row_lens"),)),
    "grammars": Room(
        (
            "runtime/structured",
            "runtime/features/device_automata.py",
            "runtime/features/grammar_output.py",
            "runtime/features/grammar_state.py",
        ),
        ((RUNNER, "GrammarState"),),
    ),
    "vectors": Room(("runtime/features/pooler.py",), ((RUNNER, "Pooler"),)),
    "prompt log-probabilities": Room(("runtime/features/prompt_scorer.py",), ((RUNNER, "PromptScorer"),)),
    "routed experts": Room(("runtime/features/expert_recorder.py",), ((RUNNER, "ExpertRecorder"),)),
    "sleep": Room(("runtime/worker/gpu/mapped_memory.py",), ((RUNNER, "RunnerMemory"),)),
    "images": Room(("runtime/worker/images.py",), ((RUNNER, "RunnerImages"),)),
    "tier": Room(tuple(f"runtime/tier/{name}.py" for name in TIER), ((RUNNER, "tier_of"),)),
    "heads": Room(("runtime/worker/heads",), ((RUNNER, "RunnerHead"),)),
    "CPU kernels": Room(("runtime/kernels/cpu", "runtime/kernels/llvm", "runtime/quant/llvm_format.py")),
    "recurrent states": Room(
        (
            "runtime/kernels/states",
            "runtime/kernels/cpu/states",
            "runtime/models/mixers/delta_rule.py",
            "runtime/models/mixers/short_conv.py",
        ),
        (
            ("runtime/kernels/operations.py", "DELTA_RULE"),
            ("runtime/kernels/cpu/operations.py", "CompiledStates"),
            ("runtime/models/decoder_build.py", "DeltaRuleMixer"),
            ("runtime/models/decoder_build.py", "ShortConvMixer"),
        ),
    ),
}
# Each tree has a process of its own, forked from one that has imported the libraries.
DECODE = """
import json, os, traceback
import numpy, torch, triton, msgspec, safetensors, tokenizers, jinja2

def decode():
    from tests.models.test_runner_extras import CONFIG, TINY, tokens_of
    from dataclasses import replace
    from runtime.assembly.runner import build_runner
    from runtime.worker.sources import DummySource
    made = [build_runner(replace(CONFIG, kernel_backend=name), DummySource(TINY)) for name in ("auto", "torch")]
    return [tokens_of(runner) for runner in made]

for tree in sys.argv[2:]:
    if not (child := os.fork()):
        os.chdir(tree)
        sys.path[:] = [tree, *sys.path[1:], sys.argv[1]]
        try:
            found = decode()
        except BaseException:
            found = traceback.format_exc()
        with open("found.json", "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.waitpid(child, 0)
"""


def _prune(tree: Path, rooms: list[Room]) -> None:
    """Copy the runtime without these rooms and their lines of assembly."""
    lines = [line for room in rooms for line in room.assembly]
    copy_tree(tree, ["runtime"])
    for file, name in lines:
        old = (tree / file).read_text().splitlines(keepends=True)
        kept = [line for line in old if name not in line]
        assert 1 <= len(old) - len(kept) <= 2, "an import and a line of assembly"
        (tree / file).write_text("".join(kept))
    for path in {path for room in rooms for path in room.paths}:
        shutil.rmtree(tree / path, ignore_errors=True)
        (tree / path).unlink(missing_ok=True)


def test_runner_decodes_without_each_room(tmp_path: Path):
    missing = {"none": [], "all": [*ROOMS], **{name: [name] for name in ROOMS}}
    trees = {name: tmp_path / str(number) for number, name in enumerate(missing)}
    for name, rooms in missing.items():
        _prune(trees[name], [ROOMS[room] for room in rooms])
    output_of(DECODE, tmp_path, str(ROOT), *map(str, trees.values()))
    tokens = {name: json.loads((tree / "found.json").read_text()) for name, tree in trees.items()}
    compiled, references = tokens["none"]
    want = {name: [compiled, references] for name in missing}
    want["CPU kernels"] = want["all"] = [references, references]
    assert tokens == want


def test_architecture_page_names_each_room():
    page = (ROOT / "docs/architecture.md").read_text()
    _, _, table = page.partition("## Optional rooms")
    table = table.partition("\n## ")[0]
    assert [path for room in ROOMS.values() for path in room.paths if path not in table] == []


def test_hybrid_model_without_its_room_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder_build, "_WITH_STATES", {})
    spec = changed(TINY, mixer=(ShortConvSpec(TINY.hidden_size, 3), None))
    with pytest.raises(CallboardError, match=r"layers of ShortConvSpec, whose mixer this build lacks"):
        build_runner(CONFIG, DummySource(spec))
