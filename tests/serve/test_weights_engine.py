"""Updates of the weights over HTTP, with a real engine loop over a socket. Only its runner is a fake."""

import asyncio

import httpx

from runtime.base.types import CallboardError
from tests.support.engine.links import eventually
from tests.support.http.serving import serving

TENSORS = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}


async def test_a_stream_goes_on_with_the_new_weights():
    async with serving(delay_s=0.02, weight_updates=True) as (engine, url), httpx.AsyncClient(base_url=url) as http:

        async def post(path: str, **body: object) -> dict:
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        rollout = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        running = asyncio.create_task(post("/v1/completions", **rollout))
        await eventually(lambda: engine.loop.core.scheduler.stats.steps > 5)
        await post("/pause?mode=keep")
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        waiting = asyncio.create_task(post("/v1/completions", **rollout, min_weight_version=7))
        await post("/start_weight_update")
        await post("/update_weights", update_info=TENSORS)
        done = await post("/finish_weight_update", weight_version="7", wait_stored=True)
        assert (done["weight_version"], done["serial"], done["stored"]) == ("7", 1, True)
        assert not running.done()
        await post("/resume")
        (choice,) = (await running)["choices"]
        (before, after) = choice["weight_versions"]
        assert (before["version"], after["version"]) == ("default", "7")
        assert (before["start"], before["end"], after["end"]) == (0, after["start"], 40)
        (choice,) = (await waiting)["choices"]
        assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 40}]
        info = (await http.get("/weight_info")).json()
        assert (info["weight_version"], info["paused"], len(info["engines"])) == ("7", False, 1)
        assert (await http.get("/get_world_size")).json() == {"world_size": 1}


async def test_an_update_reports_what_it_did_to_a_head():
    async with serving(weight_updates=True) as (engine, url), httpx.AsyncClient(base_url=url) as http:
        for head in ("kept", "updated"):
            engine.runners[-1].draft_head = head
            await http.post("/start_weight_update")
            await http.post("/update_weights", json={"update_info": TENSORS})
            assert (await http.post("/finish_weight_update")).json()["draft_head"] == head


async def test_a_pause_that_aborts_returns_what_there_is():
    async with serving(delay_s=0.02, weight_updates=True) as (engine, url), httpx.AsyncClient(base_url=url) as http:
        rollout = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
        running = asyncio.create_task(http.post("/v1/completions", json=rollout))
        await eventually(lambda: engine.loop.core.scheduler.stats.steps > 5)
        assert (await http.post("/pause")).json() == {"status": "paused"}  # as in vLLM, it aborts
        (choice,) = (await running).json()["choices"]
        count = len(choice["token_ids"])
        assert (choice["finish_reason"], 0 < count < 400) == ("abort", True)
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": count}]


async def test_a_part_that_does_not_fit_changes_nothing():
    async with serving(weight_updates=True) as (engine, url), httpx.AsyncClient(base_url=url) as http:
        engine.runners[-1].refuses["weights_receive"] = CallboardError("The model has no tensor a.")
        await http.post("/start_weight_update")
        refused = await http.post("/update_weights", json={"update_info": TENSORS})
        assert "The model has no tensor a." in refused.json()["error"]["message"]
        late = await http.post("/finish_weight_update")
        assert (late.status_code, late.json()["error"]["code"]) == (409, "no_weight_update")
        assert (await http.get("/weight_info")).json()["serial"] == 0
