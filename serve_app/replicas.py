"""Serve's replicas of engines, and the options for their number."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from actors.engine.autoscaling import ServePolicy, report_of
from actors.engine.supervisor import Supervisor
from actors.ray.deployments import (
    RUNNING_REQUESTS_KEY,
    check_options,
    one_sentence,
    refused_option,
    replica_options,
    report_own_requests,
)
from actors.ray.names import engines_of
from actors.ray.process import ignore_logging_errors
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from serve_app.settings import ScalingSettings

_REPORTS_S = 1.0  # seconds between an engine's reports to the scaling policy
_LOOK_BACK_S = 3.0
_LEAST_REQUESTS = 0.001  # reported by an engine that may not end, so that Serve's own policy keeps one

logger = logging.getLogger("ray.serve")


class EngineHost:
    """One Serve replica: the supervisor of one engine, with its own placement group."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, gpu: bool, drain_timeout_s: float, sleeps: bool
    ) -> None:
        ignore_logging_errors()
        self._drain_timeout_s, self._sleeps = drain_timeout_s, sleeps
        report_own_requests()
        self._refused: str | None = None
        self._num_live = 0.0  # the engine's requests at its last report
        with one_sentence():
            check_options(ServePolicy.__name__, sleeps)
            context = serve.get_replica_context()
            group = ray.util.get_current_placement_group()
            assert group is not None, "build_app requests one"
            engines = engines_of(context.app_name, config, context.deployment)
            name = engines + context.replica_id.unique_id  # unlike a rank, this id is never reused
            if config.kv_tier_name is None:  # the next start of this application finds its tier again
                config = replace(config, kv_tier_name=context.app_name)
            self._supervisor = Supervisor(config, name, group, gpu)
            await self._supervisor.start()

    def reconfigure(self, user_config: Any) -> None:
        """Serve calls this for `user_config`, which `check_health` refuses."""

    def check_health(self) -> None:
        """Serve replaces this replica, and with it the engine, when the engine cannot be restarted.

        An option that Serve has changed in place ends no engine, even if it cannot work; the log then has a sentence.
        """
        refused = refused_option(
            serve.get_replica_context().deployment, replica_options(), ServePolicy.__name__, self._sleeps
        )
        if refused != self._refused and refused is not None:
            logger.error(refused)
        self._refused = refused
        if self._supervisor.failed:
            raise CallboardError(self._supervisor.failed)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return figures for a scaling policy; Serve calls this once a second for each replica.

        Serve's own policy counts RUNNING_REQUESTS_KEY."""
        figures = await self._supervisor.figures()
        if figures is not None:  # while an engine restarts, its requests wait for it
            self._num_live = figures.num_live
        least = 0.0 if self._sleeps else _LEAST_REQUESTS
        return {**report_of(figures), RUNNING_REQUESTS_KEY: max(least, self._num_live)}

    async def wake(self) -> None:
        """Return when an engine exists. Serve starts a replica for this call without one."""

    async def __del__(self) -> None:
        """Drain the engine; Serve calls this before it ends the replica."""
        await self._supervisor.drain(self._drain_timeout_s)


def replica_count(scaling: ScalingSettings) -> dict[str, Any]:
    """Return Serve's options for the number of a model's engines."""
    if scaling.least == scaling.most:
        return {"num_replicas": scaling.most}
    limits = {
        "min_engines": scaling.least,
        "max_engines": scaling.most,
        "downscale_delay_s": scaling.scale_in_delay_s,
        "idle_s": math.inf if scaling.idle_sleep is None else float(scaling.idle_sleep),
        "least_awake_s": _LOOK_BACK_S + 2 * _REPORTS_S,
    }
    policy: Any = AutoscalingPolicy(policy_function=ServePolicy, policy_kwargs=limits)  # type: ignore[no-untyped-call]
    autoscaling = AutoscalingConfig(
        min_replicas=scaling.least,
        max_replicas=scaling.most,
        policy=policy,
        metrics_interval_s=_REPORTS_S,
        # Serve's own rule, which starts the first replica, counts the calls in this period.
        look_back_period_s=_LOOK_BACK_S,
        # The policy has all delays.
        upscale_delay_s=0,
        downscale_delay_s=0,
        downscale_to_zero_delay_s=0,
    )
    return {"autoscaling_config": autoscaling}
