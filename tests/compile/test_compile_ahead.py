"""A start's kernels are found without a GPU, and compiled under the keys that their launches have."""

import json
import logging
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.library.models import CONFIGS, spec_of
from runtime.base.config import EngineConfig
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.compilation import helper
from runtime.compilation.ahead import CompileJob, HelpedKernels, kernels_ahead, listed_kernels
from runtime.compilation.fill import gpu_of
from runtime.compilation.helper import KernelHelper
from runtime.compilation.spec_source import SpecSource
from runtime.models import load_spec
from runtime.models.heads.mtp import mtp_spec
from runtime.worker.extras import KernelParts
from serve_app import cli

ROOT = Path(__file__).parents[2]
# Kernels of a dense model before the first request: graphs, prompts, sampling and grammars.
DENSE = {
    "_advance_states_kernel", "_apply_bitmask_kernel", "_best_of_row_kernel", "_best_of_tile_kernel",
    "_build_inputs_kernel", "_decode_attention_kernel", "_gated_activation_kernel", "_mask_states_kernel",
    "_penalties_kernel", "_prefill_attention_kernel", "_read_input_kernel", "_rms_norm_kernel", "_rope_store_kv_kernel",
    "_scatter_writes_kernel", "_tile_kernel", "_vector_kernel", "_write_output_kernel", "choose_kernel",
}  # fmt: skip
# Kernels that a head adds, with the 8-bit output head for its drafts.
HEAD_KERNELS = {
    "_accept_drafts_kernel", "_keep_block_ends_kernel", "_keep_drafts_kernel", "_wna16_skinny_gemm_kernel",
    "wna16_gemv_kernel",
}  # fmt: skip


def job(**changes: object) -> CompileJob:
    config = EngineConfig(**changes)
    return CompileJob(SpecSource(spec_of("tiny"), config=config), Shard(), False, gpu_of("sm_90a"), 1)


def test_recorded_kernels_have_the_keys_of_launches(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "kernels" / "recorded_start.py")],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found["names"]) == DENSE
    assert set(found["head_names"]) == HEAD_KERNELS
    assert found["compiled"]
    assert found["hits"] == [True]


def test_config_alone_describes_a_head(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["tiny"]))
    assert SpecSource.at(tmp_path, EngineConfig()).draft_head is None
    spec = SpecSource.at(tmp_path, EngineConfig(draft="mtp", num_draft_tokens=2)).draft_head
    assert spec == mtp_spec(spec_of("tiny"))


@pytest.mark.thorough
def test_compile_fills_a_folder(tmp_path, capsys):
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS["tiny"]))
    settings = ["--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--max-model-len", "64", "--no-cuda-graphs"]
    for cached in (False, True):
        assert cli.main(["compile", str(model), "--cache", str(cache), *settings]) == 0
        found = re.search(r", sm_90a, rank 0: (\d+) kernels, (\d+) were in the cache", capsys.readouterr().out)
        assert found is not None
        assert int(found[1]) >= len(DENSE) - 3  # no graphs
        assert int(found[2]) == (int(found[1]) if cached else 0)


def test_unknown_target_is_refused():
    with pytest.raises(CallboardError, match="sm_70"):
        gpu_of("sm_70")


def test_target_may_name_its_multiprocessors():
    assert gpu_of("sm_90a:114").multi_processor_count == 114


@pytest.mark.parametrize("fault", ["import", "killed"])
def test_start_survives_a_broken_helper(fault, monkeypatch, caplog):
    if fault == "import":
        monkeypatch.setattr(helper, "MODULE", "runtime.no_such_module")
    own = KernelHelper()
    if fault == "killed":
        own._process.kill()
    with caplog.at_level(logging.WARNING):
        HelpedKernels(own, job()).wait()
    assert "not compiled ahead" in caplog.text


def test_every_family_can_be_sent_to_a_helper():
    for config in CONFIGS.values():
        spec, weight_map = load_spec(config)
        own = replace(job(), source=SpecSource(spec, weight_map=weight_map))
        assert pickle.loads(pickle.dumps(own)) == own


def test_start_survives_what_a_helper_cannot_get(caplog):
    with caplog.at_level(logging.WARNING):
        assert kernels_ahead(KernelParts(EngineConfig(), None, None, Shard(), False, None), None) is None  # type: ignore[arg-type]
    assert "not compiled ahead" in caplog.text


def test_list_is_used_only_if_the_cache_has_all(tmp_path, monkeypatch):
    from runtime.compilation import triton_cache

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    own, present = job(), {"one", "two"}
    monkeypatch.setattr(triton_cache, "is_cached", lambda key, name: key in present)
    assert listed_kernels(own) is None
    (tmp_path / own.list_name).write_text(json.dumps([["one", "a_kernel"], ["two", "b_kernel"]]))
    assert listed_kernels(own) == ["a_kernel", "b_kernel"]
    present.remove("two")
    assert listed_kernels(own) is None


def test_list_depends_on_settings_and_the_gpu():
    names = {job().list_name, job(max_num_seqs=7).list_name, replace(job(), facts=gpu_of("sm_80")).list_name}
    assert len(names) == 3
