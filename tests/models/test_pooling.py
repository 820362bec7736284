"""Vectors of prompts equal transformers' in fp32, however the engine computes them."""

import asyncio
import json
import math
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model.pooling import Pooling
from runtime.base.types import CallboardError, FinishReason, Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.llm import LLM
from runtime.loading.pooling import read_pooling
from runtime.output.score_prompt import PairPrompter
from runtime.output.vectors import embedding, score
from runtime.policy.admission import Admission
from runtime.text.tokenizer import Tokenizer
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from tests.support.engine.fake_runner import FixedShare, sequential_vector
from tests.support.engine.links import INFO, Engine, eventually, link_to
from tests.support.models.family_cases import save_model

POOLED = SamplingParams(max_tokens=1, pooled=True)
PROMPTS = [np.random.default_rng(i).integers(3, 101, n).tolist() for i, n in enumerate((50, 1, 2, 17, 33, 100, 17))]
PROMPTS.append([*PROMPTS[0][:40], *PROMPTS[3]])  # a prefix that another prompt leaves in a shared cache
SIZES = {"num_kv_blocks": 80, "max_num_seqs": 4, "max_num_batched_tokens": 60, "block_size": 4}


def open_core(folder, **config):
    config = EngineConfig(**{"model": "tiny", "device": "cpu", "num_threads": 1} | SIZES | config)
    with mock.patch.object(ModelRunner, "_warm_up"):
        runner = build_runner(config, CheckpointSource(folder))
    return build_engine(config, runner.info, InProcess(runner))


def run(core, prompts=PROMPTS, params=POOLED, salt=""):
    """The vectors of the prompts, in turn, or the reason of a failure."""
    found = {}
    for i, prompt in enumerate(prompts):
        core.add(Request(str(i), prompt, len(prompt), params, cache_salt=salt), i)
    while core.has_work:
        output = core.step()
        found |= {state.owner: vector.numbers for state, vector in output.reports}
        found |= {state.owner: reason for state, reason in output.finished if reason is not FinishReason.LENGTH}
    return [found[i] for i in range(len(prompts))]


def save_headless(folder, case, architecture, mode):
    """As sentence-transformers saves: without a head and without `model.` before names, and with files that describe
    how vectors are made."""
    model = save_model(folder, case)
    model.model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"include_prompt": True} | modes))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"idx": i, "path": p, "type": f"sentence_transformers.models.{t}"} for i, (p, t) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(modules))
    return model


def cosines(found, want):
    return [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(found, want, strict=True)]


@pytest.mark.parametrize(
    ("case", "architecture", "mode"),
    [
        ("qwen3", "Qwen3ForCausalLM", "lasttoken"),  # Qwen3-Embedding
        ("mistral", "MistralModel", "lasttoken"),  # e5-mistral
        ("qwen2", "Qwen2ForCausalLM", "lasttoken"),  # gte-Qwen2
        ("llama", "LlamaModel", "mean_tokens"),
    ],
)
@torch.no_grad()
def test_embeddings_equal_transformers(case, architecture, mode, tmp_path):
    theirs = save_headless(tmp_path, case, architecture, mode).model
    cores = [open_core(tmp_path, max_num_batched_tokens=budget) for budget in (60, 7)]
    pooling = cores[0].scheduler.info.pooling
    assert pooling == Pooling("last" if mode == "lasttoken" else "mean", True, case == "qwen3")
    want = []
    for prompt in PROMPTS:
        states = theirs(torch.tensor([prompt])).last_hidden_state[0]
        want.append((states.mean(0) if mode == "mean_tokens" else states[-1]).numpy())
    for core in cores:
        found = [embedding(pooled, pooling) for pooled in run(core)]
        assert min(cosines(found, want)) > 0.999999
        assert [np.linalg.norm(vector) for vector in found] == pytest.approx([1.0] * len(found))
    short = embedding(run(cores[0])[0], replace(pooling, cuts_dimensions=True), 20)
    assert short == pytest.approx(want[0][:20] / np.linalg.norm(want[0][:20]), abs=1e-5)
    if case != "qwen3":  # tied, so its head is there
        with pytest.raises(CallboardError, match="makes no text"):
            cores[0].add(Request("text", [5], 1, SamplingParams()))


@torch.no_grad()
def test_scores_equal_a_classifiers(tmp_path):
    """Qwen3-Reranker in its converted form, and by two rows of its head."""
    theirs = save_model(tmp_path, "qwen3")
    want = torch.stack([theirs(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": "", "type": "x.Transformer"}, {"path": "1", "type": "x.LogitScore"}])
    )
    (tmp_path / "1").mkdir()
    (tmp_path / "1/config.json").write_text(json.dumps({"true_token_id": 7, "false_token_id": 9}))
    scores = [score(pooled) for pooled in run(open_core(tmp_path))]
    assert scores == pytest.approx(want[:, [7, 9]].softmax(-1)[:, 0].tolist(), abs=1e-5)
    config = transformers.Qwen3Config(**theirs.config.to_dict() | {"num_labels": 1})
    converted = transformers.Qwen3ForSequenceClassification(config).eval()
    converted.model = theirs.model
    converted.score.weight[:] = (theirs.lm_head.weight[7] - theirs.lm_head.weight[9])[None]
    (tmp_path / "converted").mkdir()
    converted.save_pretrained(tmp_path / "converted")
    core = open_core(tmp_path / "converted")
    assert [score(pooled) for pooled in run(core)] == pytest.approx(scores, abs=1e-5)
    assert core.scheduler.stats.prompt_tokens_cached > 0  # of the prompt that begins like the first
    assert not core.scheduler.info.makes_text


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_no_toggle_changes_a_bit(kind, tmp_path):
    """Deterministic mode: chunks, caches, batches, depth and preemption do not show."""
    save_model(tmp_path, "llama")
    want = run(open_core(tmp_path, pooling=kind, deterministic=True, max_num_seqs=1))
    for toggle in (
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"chunked_prefill": False, "max_model_len": 128, "max_num_batched_tokens": 128, "kv_layout": "contiguous"},
        {"num_kv_blocks": 30, "max_model_len": 104, "max_num_batched_tokens": 8},
    ):
        core = open_core(tmp_path, pooling=kind, deterministic=True, **{"num_kv_blocks": None} | toggle)
        core.extras[Admission].lengths = FixedShare(0.0)
        assert run(core) == want, toggle
        assert not core.scheduler.find_faults()


def test_a_fault_stays_with_its_request(tmp_path):
    save_model(tmp_path, "llama")
    core = open_core(tmp_path, pooling="last")
    core.executor._runner.decoder.embed[7] = math.nan
    good = [t if t != 7 else 8 for t in PROMPTS[0]]
    bad, fine = run(core, [[*good[:9], 7, *good[9:]], good])
    assert bad is FinishReason.ERROR
    assert np.isfinite(np.frombuffer(fine, np.float32)).all()


def test_unsupported_options_are_named(tmp_path):
    (tmp_path / "1").mkdir()
    for modules, config, named in (
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_lasttoken": True}, "Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "cls_token"),
        (["LogitScore"], {"true_token_id": "yes"}, "true_token_id"),
        (None, {}, "no list of modules"),
    ):
        found = modules and [{"path": "1", "type": f"a.b.{m}"} for m in modules]
        (tmp_path / "modules.json").write_text(json.dumps(found))
        (tmp_path / "1/config.json").write_text(json.dumps(config))
        with pytest.raises(CallboardError, match=named):
            read_pooling(tmp_path, {})
    save_model(tmp_path, "llama")
    (tmp_path / "modules.json").unlink()
    with pytest.raises(CallboardError, match="pooling=last"):
        run(open_core(tmp_path), [[1, 2]])


# ---- offline Python --------------------------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path, write_tiny_gguf):
    """A tiny model as an LLM, with a module after its own. It has the ids of the tokenizer's capital letters."""
    Tokenizer.load(write_tiny_gguf())._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tiny.gguf").unlink()

    def load_with(case, module, config, **settings):
        save_model(tmp_path, case)
        modules = [("", "Transformer"), ("1", module), ("2", "Normalize")]
        (tmp_path / "modules.json").write_text(json.dumps([{"path": p, "type": f"x.{name}"} for p, name in modules]))
        (tmp_path / "1").mkdir(exist_ok=True)
        (tmp_path / "1/config.json").write_text(json.dumps(config))
        with mock.patch.object(ModelRunner, "_warm_up"):
            return LLM(str(tmp_path), device="cpu", num_threads=1, **SIZES | settings)

    return load_with


TEXTS = ["WHERE IS IT", "C", "HERE, AND NOT THERE", "WHERE IS IT"]


def test_vectors_offline(load, tmp_path):
    llm = load("qwen3", "Pooling", {"pooling_mode_lasttoken": True})
    core, pooling = open_core(tmp_path), Pooling("last", True, True)
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    want = [embedding(pooled, pooling).tolist() for pooled in run(core, ids)]
    for asked in (TEXTS, ids):
        for found, expected in zip(llm.embed(asked), want, strict=True):
            assert found == pytest.approx(expected, abs=1e-6)
    (short,) = llm.embed(TEXTS[0], 20)
    assert short == pytest.approx(np.array(want[0][:20]) / np.linalg.norm(want[0][:20]), abs=1e-5)
    cosines = np.array(want) @ np.array(want[0])
    assert llm.score(TEXTS[0], TEXTS) == pytest.approx(cosines.tolist(), abs=1e-5)
    assert llm.score(TEXTS[0], TEXTS[1]) == pytest.approx(cosines[1:2].tolist(), abs=1e-5)
    assert llm.score(TEXTS[0], []) == llm.embed([]) == []
    for dimensions, named in ((0, "at least 1"), (61, "vectors have 60")):
        with pytest.raises(CallboardError, match=f"dimensions is {dimensions}.* {named}"):
            llm.embed(TEXTS, dimensions)
    with pytest.raises(CallboardError, match="prompt is empty"):
        llm.embed([TEXTS[0], []])
    assert not llm.engine.has_work, "the texts before the one that is refused"
    llm.runner.decoder.embed[ids[1][0]] = math.nan
    with pytest.raises(CallboardError, match=r"Prompt 1 has no vector: The model .* not finite"):
        llm.embed(TEXTS)
    assert "not finite" in llm.generate(TEXTS[1])[0].error
    assert llm.embed([TEXTS[2]])[0] == pytest.approx(want[2], abs=1e-6)


def test_scores_offline(load, tmp_path):
    model = "llama", "LogitScore", {"true_token_id": 7, "false_token_id": 9}
    llm = load(*model)
    core, encode = open_core(tmp_path), llm.tokenizer.encode
    prompter = PairPrompter(lambda text, special, part: encode(text, special), llm.runner.info.pooling)
    pairs = [prompter.ids(TEXTS[0], text) for text in TEXTS]
    assert llm.score(TEXTS[0], TEXTS) == pytest.approx([score(p) for p in run(core, pairs)], abs=1e-5)
    assert llm.engine.scheduler.stats.prompt_tokens_cached > 0  # the query's
    with pytest.raises(CallboardError, match="makes scores, not embeddings"):
        llm.embed(TEXTS)
    plain = load(*model, pooling="none")
    for ask in (plain.embed, partial(plain.score, "Q")):
        with pytest.raises(CallboardError, match="makes no vectors; start it with pooling=last"):
            ask(["A"])


# ---- the link --------------------------------------------------------------------------------------------------------


async def test_vectors_arrive_despite_deaths_of_engines():
    engine = Engine(info=replace(INFO, pooling=Pooling("last")), max_num_batched_tokens=3)
    link = link_to(engine)
    await link.start()
    prompts = [[1 + (i + k) % 20 for k in range(60)] for i in range(12)]
    requests = [Request(f"r{i}", prompt, len(prompt), POOLED) for i, prompt in enumerate(prompts)]

    async def read(request):
        (output,) = [output async for output in link.generate(request)]
        assert (output.token_ids, output.finish_reason) == ([], FinishReason.LENGTH)
        (vector,) = output.reports
        return vector.numbers

    reading = asyncio.gather(*map(read, requests))
    await eventually(lambda: engine.loop.core.scheduler.stats.steps > 15)
    engine.die()
    await eventually(lambda: "restarting" in (link.health() or ""))
    engine.restart()
    assert await reading == [sequential_vector(request) for request in requests]
    link.close()
    engine.loop.close()
