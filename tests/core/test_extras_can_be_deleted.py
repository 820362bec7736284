"""The core is a correct engine without extras: each can be deleted, and the others serve the same tokens."""

from pathlib import Path

import pytest

from tests.support.pruned_tree import ROOT, copy_tree, output_of

EXTRAS = {  # name -> the file that is deleted, its class, and the arguments of that class
    "queue sizes": ("runtime/policy/queue_sizes.py", "QueueSizes", ""),
    "admission": ("runtime/policy/admission.py", "Admission", ""),
    "isolation": ("runtime/policy/isolation.py", "Isolation", ""),
    "branch eviction": ("runtime/policy/branch_eviction.py", "BranchEviction", ""),
    "static batching": ("runtime/policy/static_batching.py", "StaticBatching", ""),
    "pacing": ("runtime/policy/step_pacing.py", "StepPacing", "None, lambda: 0.0"),
    "adapters": ("runtime/features/adapter_table.py", "AdapterTable", "1"),
    "grammars": ("runtime/features/grammars.py", "Grammars", "INFO"),
    "prompt log-probabilities": ("runtime/features/prompt_logprobs.py", "PromptScoring", ""),
    "pooled prompts": ("runtime/features/pooled_prompts.py", "PooledPrompts", "INFO"),
    "routed experts": ("runtime/features/expert_reports.py", "ExpertReports", "INFO"),
    "images": ("runtime/features/images.py", "Images", "INFO, CONFIG"),
    "tier": ("runtime/tier/extra.py", "Tier", "INFO, Empty(), shortest=8"),
    "speculation": ("runtime/speculation/choose_k.py", "Speculation", "Ngram(), 3, (), 0.0"),
}
NEEDED = ("runtime/core", "runtime/base", "runtime/policy", "runtime/features", "runtime/speculation", "runtime/tier")
ENGINE = """
import numpy as np
from runtime.core.engine import EngineCore
from runtime.core.plan import StepResult
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo, TierInfo
from runtime.base.types import CallboardError, Request, SamplingParams

INFO = ModelInfo("f", 50, 64, (0,), 24, 4, "none", "none", tier=TierInfo("", "", 64, 16))
CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=16, pipeline_depth=2)


class Empty:
    '''A tier's index without entries or room.'''

    def find(self, keys):
        return np.zeros(len(keys) // 16, bool)

    def reserve(self, keys, salt, expires=0):
        return self.find(keys)

    def touch(self, keys, expires=0):
        pass

    drop = touch


class Runner:
    '''Samples the token that follows from the position and the request's seed.'''

    def __init__(self):
        self.plans, self.seeds, self.tables = [], {}, {}

    def submit(self, plan):
        self.plans.append(plan)

    def collect(self):
        plan, out = self.plans.pop(0), []
        for new in plan.new:
            self.seeds[new.slot] = new.seed
        for slot, end, count in zip(plan.slots.tolist(), plan.ends.tolist(), plan.num_samples.tolist()):
            out += [1 + (self.seeds[slot] * position) % 7 for position in range(end - count, end)]
        return StepResult(plan.step_id, np.array(out, np.int32))


core = EngineCore(CONFIG, INFO, Runner(), [EXTRAS])
for i in range(12):
    prompt = [1 + i % 3] * (5 + i)
    core.add(Request(str(i), prompt, len(prompt), SamplingParams(max_tokens=9 + 3 * i, ignore_eos=True), seed=1 + i))
got = {str(i): [] for i in range(12)}
for step in range(2000):
    if not core.has_work:
        break
    if step == 9:  # the runners are lost
        core.lose()
        core.recover(Runner())
    output = core.step()
    for state, token in zip(output.states, output.token_ids) if output else ():
        got[state.request.request_id].append(token)
assert core.scheduler.find_faults() == [] and not core.has_work
print(got)
for name, params in (("pooled", {"max_tokens": 1, "pooled": True}), ("prompt_logprobs", {"prompt_logprobs": 0}),
                     ("routed_experts", {"routed_experts": True})):
    try:
        core.add(Request(name, [1, 2], 2, SamplingParams(**params)))
    except CallboardError as e:
        assert "does not serve" in str(e) or "makes no vectors" in str(e) or "no experts" in str(e)
"""


def _serve(root: Path, names: list[str]) -> str:
    """Return the tokens that an engine with these extras serves, from the tree at `root`."""
    imports = [f"from {EXTRAS[n][0].removesuffix('.py').replace('/', '.')} import {EXTRAS[n][1]}" for n in names]
    if "speculation" in names:
        imports.append("from runtime.speculation.ngram import Ngram")
    made = ", ".join(f"{EXTRAS[name][1]}({EXTRAS[name][2]})" for name in names)
    return output_of("\n".join(imports) + ENGINE.replace("EXTRAS", made), root)


@pytest.fixture(scope="module")
def tokens() -> str:
    return _serve(ROOT, list(EXTRAS))


@pytest.mark.parametrize("deleted", EXTRAS)
def test_engine_serves_without_an_extra(deleted: str, tokens: str, tmp_path: Path):
    copy_tree(tmp_path, NEEDED, ["runtime/speculation" if deleted == "speculation" else EXTRAS[deleted][0]])
    assert _serve(tmp_path, [name for name in EXTRAS if name != deleted]) == tokens


def test_core_serves_alone(tokens: str, tmp_path: Path):
    copy_tree(tmp_path, NEEDED[:2])
    assert _serve(tmp_path, []) == tokens
