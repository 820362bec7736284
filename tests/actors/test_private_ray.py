"""A version of Ray without a private part: one warning, and the rest works."""

import logging
from types import SimpleNamespace

import pytest
from ray import serve

from actors.ray import private


@pytest.fixture(autouse=True)
def no_earlier_warnings():
    private._is_off.cache_clear()
    yield
    private._is_off.cache_clear()


class Old:
    """A deployment's class."""


def test_an_unknown_option_of_a_deployment_costs_one_warning(monkeypatch, caplog):
    def deployment(cls, name=None):
        return cls, name

    monkeypatch.setattr(serve, "deployment", deployment)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert private.deployment(Old, name="old", max_surge_percent=100) == (Old, "old")
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "lacks a part that Callboard uses, so the option max_surge_percent of Serve's deployments is off."
    )


@pytest.mark.parametrize(
    ("call", "returned"),
    [
        (private.free_resources, []),
        (private.omit_daemons, None),
        (lambda: private.replace_get_node(lambda get_node: get_node), None),
    ],
)
def test_a_missing_part_of_ray_costs_one_warning(monkeypatch, caplog, call, returned):
    monkeypatch.setattr(private, "_ray", SimpleNamespace(_private=SimpleNamespace()))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert call() == returned
    assert len(caplog.records) == 1


def test_daemons_without_such_an_argument_start_as_ray_does(monkeypatch, caplog):
    node = SimpleNamespace(start_api_server=len)
    parts = SimpleNamespace(parameter=SimpleNamespace(RayParams=dict.fromkeys), node=SimpleNamespace(Node=node))
    monkeypatch.setattr(private, "_ray", SimpleNamespace(_private=parts))
    private.omit_daemons()
    assert parts.parameter.RayParams is not None
    assert node.start_api_server is len
    assert "monitors" in caplog.text
