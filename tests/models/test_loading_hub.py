"""Models from a small hub that listens on loopback and implements the hub's protocol, and the cache of all tools."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.support.models.fake_hub import FakeHub

TOKEN = "hf_of_a_test"
SHAS = {"main": "a" * 40, "v2": "b" * 40}


def _files(seed: int) -> dict[str, bytes]:
    """A model in two shards, and the other files of a hub."""
    tensors = {f"w{i}": torch.full((3, 4), float(seed + i), dtype=torch.bfloat16) for i in range(4)}
    shards = {f"model-0000{i + 1}-of-00002.safetensors": list(tensors)[2 * i : 2 * i + 2] for i in range(2)}
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    return {
        "config.json": json.dumps({"seed": seed, "eos_token_id": 7}).encode(),
        "generation_config.json": b'{"eos_token_id": [7, 8]}',
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        **{shard: save({name: tensors[name] for name in names}) for shard, names in shards.items()},
        "pytorch_model.bin": b"a pickle",
        "original/consolidated.safetensors": b"the same once more",
    }


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub({"org/model": {SHAS["main"]: _files(0), SHAS["v2"]: _files(10)}}, SHAS, TOKEN) as hub:
        yield hub


_LOAD = """
import json, sys
from runtime.base.types import CallboardError
from runtime.loading.resolve import resolve

def load(model, revision=None, weights=True):
    path = resolve(model, revision, progress=False, weights=weights)
    files = sorted(p.name for p in path.iterdir())
    if not weights:
        return [str(path), files]
    import torch
    from runtime.loading.checkpoint import open_checkpoint
    checkpoint = open_checkpoint(path)
    values = [checkpoint.tensor(name, torch.float32).mean().item() for name in checkpoint.names()]
    return [str(path), files, values, checkpoint.eos_token_ids]

for arguments in json.loads(sys.argv[1]):
    try:
        print(json.dumps(load(*arguments)))
    except CallboardError as e:
        print(json.dumps(str(e)))
"""


@pytest.fixture
def load(hub: FakeHub, tmp_path: Path):
    """`resolve` and open in a separate process, because the hub's settings are read when its package is imported."""

    def run(*models: tuple, **env: str) -> list:
        settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"} | env
        command = [sys.executable, "-c", _LOAD, json.dumps(models)]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.long
@pytest.mark.thorough
def test_a_sharded_model_by_revision_and_offline(load, tmp_path):
    models = [("org/model",), ("org/model", "v2")]
    (path, files, values, ends), second = load(*models)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert files == ["config.json", "generation_config.json", *shards, "model.safetensors.index.json"]
    assert (values, ends) == ([0.0, 1.0, 2.0, 3.0], [7, 8])
    assert second[2] == [10.0, 11.0, 12.0, 13.0]
    # The shared cache of all tools: others find the model where they expect it.
    assert path == str(tmp_path / "hub" / "models--org--model" / "snapshots" / SHAS["main"])
    assert load(*models, HF_HUB_OFFLINE="1", HF_TOKEN="") == [[path, files, values, ends], second]


@pytest.mark.long
def test_what_the_hub_refuses(load):
    (no_token,) = load(("org/model",), HF_TOKEN="hf_wrong")
    assert "no model 'org/model' that you may read" in no_token
    absent, no_revision = load(("org/absent",), ("org/model", "v9"))
    assert "no model 'org/absent' that you may read" in absent
    assert "no model 'org/model' at revision 'v9' that you may read" in no_revision


@pytest.mark.long
def test_inspecting_a_model_does_not_fetch_its_weights(load, hub):
    ((_, files),) = load(("org/model", None, False))
    assert files == ["config.json", "generation_config.json", "model.safetensors.index.json"]
    assert not any(name.endswith(".safetensors") for name in hub.asked)
    assert load(("org/model",))[0][2] == [0.0, 1.0, 2.0, 3.0]  # and are when they are needed
