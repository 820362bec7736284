"""The fronts of an application as Ray lists them: the cost of made-up ids."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID, ReplicaID

from serve_app.apis.responses import ray_fronts
from serve_app.apis.responses.ray_fronts import RayFronts
from serve_app.protocol.errors import ApiError


class FakeRay:
    """Ray's actors by name, and the calls that were made."""

    def __init__(self) -> None:
        self.names, self.dead, self.listings, self.lookups = set(), set(), 0, []

    def list_named_actors(self, all_namespaces):
        self.listings += 1
        return [{"namespace": "serve", "name": name} for name in self.names]

    def get_actor(self, name, namespace):
        self.lookups.append(name)
        if name not in self.names:
            raise ValueError(name)

        async def call(function, method, *args):
            if name in self.dead:
                raise ActorDiedError
            return method

        return SimpleNamespace(__ray_call__=SimpleNamespace(remote=call))


def name_of(front: str) -> str:
    return ReplicaID(front, DeploymentID("Front", "app")).to_full_id_str()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    fake = FakeRay()
    fake.names = {name_of("own"), name_of("other")}
    context = SimpleNamespace(replica_id=ReplicaID("own", DeploymentID("Front", "app")))
    monkeypatch.setattr(ray_fronts.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(ray_fronts.ray, "get_actor", fake.get_actor)
    monkeypatch.setattr(ray_fronts.ray.util, "list_named_actors", fake.list_named_actors)
    monkeypatch.setattr(ray_fronts, "_LISTING_S", 0.05)
    return fake


async def statuses(fronts: RayFronts, *ids: str) -> list[object]:
    found = await asyncio.gather(*(fronts.call(i, "body") for i in ids), return_exceptions=True)
    return [e.status if isinstance(e, ApiError) else e for e in found]


async def test_made_up_fronts_cost_one_listing_in_all(fake):
    fronts = RayFronts()
    assert await statuses(fronts, *(f"x{i}" for i in range(300)), "other") == [404] * 300 + ["body"]
    assert (fake.listings, fake.lookups) == (1, [name_of("other")])


async def test_a_front_newer_than_the_last_listing_is_found(fake):
    fronts = RayFronts()
    assert await statuses(fronts, "late") == [404]
    fake.names.add(name_of("late"))
    assert await statuses(fronts, "late") == ["body"]


async def test_a_dead_front_is_not_looked_up_again(fake):
    fronts = RayFronts()
    assert await statuses(fronts, "other") == ["body"]
    fake.dead.add(name_of("other"))
    assert await statuses(fronts, "other") == [404]
    fake.names.remove(name_of("other"))
    assert await statuses(fronts, *["other"] * 300) == [404] * 300
    assert fake.lookups == [name_of("other")]
    assert not fronts._actors
