"""A deployment's Serve options: its own version, and options that cannot work.

Serve gives all deployments in an application one version, a hash of its `args`. So a change of any setting would
replace all replicas. Here each deployment has its own version, made from the settings that it uses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

from pydantic import PrivateAttr
from ray import serve
from ray.serve._private import replica
from ray.serve._private.common import RUNNING_REQUESTS_KEY as RUNNING_REQUESTS_KEY
from ray.serve._private.config import DeploymentConfig

from runtime.base.types import CallboardError

logger = logging.getLogger("ray.serve")


class _VersionedConfig(DeploymentConfig):
    """Options that reach Serve's controller with a version of their own."""

    _own_version: str = PrivateAttr("")

    def to_proto(self) -> Any:
        found: Any = super().to_proto()  # type: ignore[no-untyped-call]
        found.version = self._own_version  # replaces the application's
        return found


def with_version(deployment: serve.Deployment, *settings: object) -> serve.Deployment:
    """Return a deployment with replicas that Serve replaces only if one of these settings changes.

    Serve also replaces them if their resources, bundles or runtime environment change."""
    options = _VersionedConfig.model_construct(**dict(deployment._deployment_config))
    text = repr((version("callboard"), *settings))
    options._own_version = blake2b(text.encode(), digest_size=8).hexdigest()
    deployment._deployment_config = options
    return deployment


def refused_option(name: str, options: Any, policy: str | None = None, sleeps: bool = False) -> str | None:
    """Return one sentence if an option of the deployment `name` cannot work, else None.

    Args:
        options: a running replica's DeploymentConfig.
        policy: the name of the engines' scaling policy, else None.
        sleeps: True if all engines may end."""
    if options.user_config is not None:
        return f"user_config of {name} is {options.user_config!r}, which nothing reads; put settings under args."
    if policy is None:
        return None
    given, scaling = options.user_configured_option_names, options.autoscaling_config
    for option in ("max_ongoing_requests", "max_queued_requests"):
        if option in given:
            return (
                f"{option} of {name} is {getattr(options, option)}, but engines get requests without Serve; "
                "set max_num_seqs and max_queued_requests under args."
            )
    if scaling is None:
        return None
    if scaling.min_replicas == 0 and not sleeps:
        return (
            f"autoscaling_config of {name} has min_replicas 0, but a model that may have no engine needs idle_sleep "
            "under args."
        )
    if options.num_replicas and "num_replicas" in given and scaling.policy.policy_function.endswith(policy):
        return (
            f"num_replicas of {name} is {options.num_replicas}, but args let the number follow the load; "
            "leave min_replicas, max_replicas and idle_sleep out of args."
        )
    return None


def replica_options() -> Any:
    """Return this replica's DeploymentConfig, with changes that Serve made in place."""
    return serve.get_replica_context()._deployment_config


def report_own_requests() -> None:
    """Let Serve fetch this replica's figures also if it gets an `autoscaling_config` in place, after its start."""
    settings: Any = replica
    settings.RAY_SERVE_COLLECT_AUTOSCALING_METRICS_ON_HANDLE = False


@contextmanager
def one_sentence() -> Iterator[None]:
    """Let `serve status` show a CallboardError of a replica's constructor without its traceback.

    The replica's process ends with the error."""
    try:
        yield
    except CallboardError:
        sys.tracebacklimit = 0
        raise


def check_options(policy: str | None = None, sleeps: bool = False) -> None:
    """Raise CallboardError for an option of this replica that cannot work; arguments as in `refused_option`."""
    context = serve.get_replica_context()
    if sentence := refused_option(context.deployment, replica_options(), policy, sleeps):
        raise CallboardError(sentence)
