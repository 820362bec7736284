"""A runner's optional rooms: each can be deleted with its lines of assembly, and the model decodes the same tokens."""

import json
from pathlib import Path
from typing import NamedTuple

from tests.support.pruned_tree import ROOT, copy_tree, output_of

RUNNER = "runtime/assembly/runner.py"


class Room(NamedTuple):
    """An optional part of a runner."""

    paths: tuple[str, ...]
    name: str = ""  # lines of assembly contain it; empty if none names the room
    assembly: str = RUNNER


ROOMS = {
    "adapters": Room(("runtime/features/adapter_weights.py", "runtime/models/lora.py"), "RunnerAdapters"),
    "weight updates": Room(("runtime/updates",), "RunnerUpdates"),
    "speculation": Room(("runtime/speculation",), "row_lens"),
    "grammars": Room(
        (
            "runtime/structured",
            "runtime/features/device_automata.py",
            "runtime/features/grammar_output.py",
            "runtime/features/grammar_state.py",
        ),
        "GrammarState",
    ),
    "vectors": Room(("runtime/features/pooler.py",), "Pooler"),
    "prompt log-probabilities": Room(("runtime/features/prompt_scorer.py",), "PromptScorer"),
    "routed experts": Room(("runtime/features/expert_recorder.py",), "ExpertRecorder"),
    "sleep": Room(("runtime/features/mapped_memory.py",), "RunnerMemory"),
    "CPU kernels": Room(("runtime/kernels/cpu", "runtime/kernels/llvm", "runtime/quant/llvm_format.py")),
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
    copy_tree(tree, ["runtime"], [path for room in rooms for path in room.paths])
    for room in rooms:
        if room.name:
            lines = (tree / room.assembly).read_text().splitlines(keepends=True)
            kept = [line for line in lines if room.name not in line]
            assert 1 <= len(lines) - len(kept) <= 2, "an import and a line of assembly"
            (tree / room.assembly).write_text("".join(kept))


def test_runner_decodes_without_each_room(tmp_path: Path):
    missing = {"none": [], "all": [*ROOMS], **{name: [name] for name in ROOMS}}
    trees = {name: tmp_path / str(number) for number, name in enumerate(missing)}
    for name, rooms in missing.items():
        _prune(trees[name], [ROOMS[room] for room in rooms])
    output_of(DECODE, tmp_path, str(ROOT), *map(str, trees.values()))
    tokens = {name: json.loads((tree / "found.json").read_text()) for name, tree in trees.items()}
    compiled, references = tokens["none"]
    want = dict.fromkeys(missing, [compiled, references])
    want["CPU kernels"] = want["all"] = [references, references]
    assert tokens == want


def test_architecture_page_names_each_room():
    page = (ROOT / "docs/architecture.md").read_text()
    _, _, table = page.partition("## Optional rooms")
    table = table.partition("\n## ")[0]
    assert [path for room in ROOMS.values() for path in room.paths if path not in table] == []
