"""Fixtures that several files of this folder share."""

import pytest

from tests.support.engine.links import Engine
from tests.support.http.metrics import Fronts


@pytest.fixture
async def fronts():
    made = Fronts(Engine())
    await made.add()
    yield made
    await made.close()
