"""Serve's options of our deployments: which replicas a change replaces, and which options are refused."""

from copy import deepcopy
from typing import Any

import pytest
from ray import serve
from ray.serve._private.config import DeploymentConfig
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from actors.engine.autoscaling import ServePolicy
from actors.ray.deployments import refused_option, with_version


class Replica:
    pass


def version_of(*settings: object) -> str:
    """The version that Serve's controller reads, after Serve has set its own."""
    deployment: Any = with_version(serve.deployment(Replica, num_replicas=2), *settings)
    options = deepcopy(deployment.options(name="other")._deployment_config)
    options.version = "the application's"
    found = DeploymentConfig.from_proto_bytes(options.to_proto_bytes())
    assert found.num_replicas == 2
    return str(found.version)


def test_a_deployments_version_follows_its_settings():
    assert version_of("a", 1) == version_of("a", 1)
    assert len({version_of("a", 1), version_of("a", 2), version_of("b", 1), "the application's"}) == 4


OURS = AutoscalingPolicy(policy_function=ServePolicy)


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ("user_config of Engine is {'a': 1}, which nothing reads; ", {"user_config": {"a": 1}}),
        ("max_ongoing_requests of Engine is 8, but ", {"max_ongoing_requests": 8}),
        ("max_queued_requests of Engine is 9, but ", {"max_queued_requests": 9}),
        ("autoscaling_config of Engine has min_replicas 0, but ", {"autoscaling_config": {"min_replicas": 0}}),
        (
            "num_replicas of Engine is 2, but args let ",
            {"num_replicas": 2, "autoscaling_config": AutoscalingConfig(policy=OURS)},
        ),
        ("", {"num_replicas": 2}),
        ("", {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}}),
        ("", {"num_replicas": None, "autoscaling_config": AutoscalingConfig(policy=OURS)}),  # num_replicas: auto
    ],
)
def test_options_that_cannot_work_are_refused(says: str, options: dict[str, Any]):
    config = DeploymentConfig(**options, user_configured_option_names=set(options))
    refused = refused_option("Engine", config, ServePolicy.__name__)
    assert refused is None if not says else refused is not None and refused.startswith(says)
    if "user_config" not in options:
        assert refused_option("Front", config) is None


def test_a_model_that_sleeps_may_have_no_engine():
    config = DeploymentConfig(autoscaling_config=AutoscalingConfig(min_replicas=0))
    assert refused_option("Engine", config, ServePolicy.__name__, sleeps=True) is None
