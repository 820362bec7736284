"""A runner with a tier: a new runner continues a prompt that an old one has computed, with the same bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.base.config import EngineConfig
from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.core.plan import StepPlan, StepResult, Transfers
from runtime.kernels.numerics import Numerics
from runtime.tier.copies import CpuCopier
from runtime.tier.gpu_copies import GpuCopier
from runtime.tier.place import attached
from runtime.tier.region import Region
from runtime.worker.memory import plan_memory
from tests.support.engine.tier_copies import keys_of
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import TINY, changed
from tests.triton import INTERPRETING

PROMPT = [3 * i % 97 + 1 for i in range(70)]
WINDOWS = changed(TINY, window=(40, *[0] * (TINY.num_layers - 1)))
_DELTA_RULE = DeltaRuleSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, width=4)
HYBRID = changed(TINY, mixer=(*[_DELTA_RULE] * (TINY.num_layers - 1), None))
BACKENDS = [
    "auto",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1")),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CALLBOARD_TIER", str(tmp_path))


def start(backend: str = "auto", spec=TINY, **config) -> Driver:
    settings = {"kv_tier_name": "test", "kv_tier_memory": 0.01}
    return Driver(tiny_runner(spec, kernel_backend=backend, deterministic=True, **settings | config), seed=len(config))


def region_of(driver: Driver) -> Region:
    """The engine's view of the region."""
    region = attached(driver.runner.info.tier)
    assert region is not None
    return region


def transfers(driver: Driver, slot: int, num_blocks: int) -> Transfers:
    """A slot's first blocks in all groups."""
    tables = [driver.tables[slot], *driver.others[slot]]
    rows = [(group, block, i) for group, table in enumerate(tables) for i, block in enumerate(table[:num_blocks])]
    groups, blocks = (np.array([row[i] for row in rows], np.int32) for i in range(2))
    numbers = np.arange(len(rows), dtype=np.int32)
    keys = keys_of(*((group, i) for group, _, i in rows))
    return Transfers(numbers, groups, blocks, np.zeros(len(rows), np.int32), keys)


def transfer(driver: Driver, stores: Transfers | None = None, loads: Transfers | None = None) -> StepResult:
    """Execute plans without rows until all transfers have ended. Returns all that results name."""
    count = sum(len(found.numbers) for found in (stores, loads) if found is not None)
    plan, driver.plan = driver.plan, StepPlan(driver.plan.step_id + 1)
    plan.stores, plan.loads = stores, loads
    whole = driver.runner.execute(plan)
    assert whole.token_ids.shape == (0,)
    for _ in range(5000):
        if len(whole.stored) + len(whole.loaded) + len(whole.damaged) == count:
            break
        plan, driver.plan = driver.plan, StepPlan(driver.plan.step_id + 1)
        more = driver.runner.execute(plan)
        for name in ("stored", "loaded", "damaged"):
            setattr(whole, name, np.concatenate((getattr(whole, name), getattr(more, name))))
    return whole


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", [TINY, WINDOWS], ids=["tiny", "windows"])
def test_new_runner_continues_with_the_same_bits(spec, backend: str):
    old = start(backend, spec)
    assert isinstance(old.runner.tier, GpuCopier if backend == "triton" else CpuCopier)
    old.open(0, PROMPT)
    want = old.prefill(0, PROMPT, (64,))
    stores = transfers(old, 0, 4)
    region_of(old).reserve(stores.keys, 0)
    assert sorted(transfer(old, stores).stored) == stores.numbers.tolist()
    old.runner.tier.close()

    new = start(backend, spec, num_kv_blocks=100)
    new.open(0, PROMPT)
    loads = transfers(new, 0, 4)
    assert sorted(transfer(new, loads=loads).loaded) == loads.numbers.tolist()
    assert torch.equal(new.prefill(0, PROMPT, start=64), want)
    new.runner.tier.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_of_a_hybrid_return(backend: str):
    old = start(backend, HYBRID, kv_tier_memory=0.05)
    info = old.runner.info.tier
    assert info.state_slots > 0
    rows = old.runner.steps.cache.states.rows
    rows[5] = torch.randint(0, 256, rows.shape[1:], dtype=torch.uint8)
    n, parts = info.state_slots, np.arange(info.state_slots, dtype=np.int32)
    rest = np.full(n, -1, np.int32), np.full(n, 5, np.int32), parts, keys_of(*parts.tolist())
    region_of(old).reserve(rest[-1], 0)
    assert len(transfer(old, Transfers(parts, *rest)).stored) == n
    loads = Transfers(parts, rest[0], np.full(n, 7, np.int32), *rest[2:])
    assert sorted(transfer(old, loads=loads).loaded) == parts.tolist()
    assert torch.equal(rows[7], rows[5])
    old.runner.tier.close()


def test_rows_and_transfers_share_a_step():
    """The stored block is the one that earlier plans have left, and the step's own row overwrites it."""
    driver = start()
    driver.open(0, PROMPT)
    driver.prefill(0, PROMPT[:32])
    before, stores = driver.runner.steps.cache.layers[0].values.clone(), transfers(driver, 0, 1)
    region_of(driver).reserve(stores.keys, 0)
    driver.plan.stores = stores
    driver.free(0)
    driver.open(1, PROMPT[::-1])
    assert driver.tables[1][0] == stores.blocks[0]
    result = driver.step((1, 0, 32, 1))
    assert result.stored.tolist() == [0]
    assert len(result.token_ids) == 1
    after = driver.runner.steps.cache.layers[0].values
    block = int(stores.blocks[0])
    assert not torch.equal(after[:, :, block], before[:, :, block])
    loads = replace_blocks(stores, 150)
    assert transfer(driver, loads=loads).loaded.tolist() == [0]
    assert torch.equal(after[:, :, 150], before[:, :, block])
    driver.runner.tier.close()


def replace_blocks(found: Transfers, block: int) -> Transfers:
    return Transfers(found.numbers, found.groups, np.full_like(found.blocks, block), found.parts, found.keys)


def test_runner_without_a_tier_starts_no_copies():
    on, off = start(), start(kv_tier_memory=0)
    assert off.runner.tier is off.runner.steps.copier is off.runner.info.tier is None
    assert replace(on.runner.info, tier=None) == off.runner.info
    assert tiny_runner(kv_tier_name="a", prefix_cache=False).tier is None
    assert tiny_runner(kv_tier_name="a", is_draft=True).tier is None
    on.runner.tier.close()


def test_memory_plan_has_staging_on_a_gpu():
    config = EngineConfig(max_model_len=64, kv_tier_name="a").sized_for("cuda")
    sizes = {}
    for device in ("cuda", "cpu"):
        numerics = Numerics(torch.float32, torch.device(device), "triton", packed=False, deterministic=False)
        for name, own in (("on", config), ("off", replace(config, kv_tier_memory=0))):
            sizes[device, name] = plan_memory(own, TINY, numerics, 8 << 30)
    assert sizes["cpu", "on"].staging == sizes["cuda", "off"].staging == 0
    assert 4 * 8192 < sizes["cuda", "on"].staging <= sizes["cuda", "on"].kv // 16
    assert "copies of the KV tier" in str(sizes["cuda", "on"])
    assert "KV tier" not in str(sizes["cpu", "on"])
