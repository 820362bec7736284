"""The client for other jobs in the same Ray: rollouts, scores and new weights, without HTTP.

    client            RolloutClient: blocking calls and iterators over its own event loop
    batch             one call's requests in flight, and the rollouts that have ended
    rollout           Rollout: one finished output
    engines           finds an application's engines; streams that are read once, at their end
    join              connects the process to the running Ray
    loop_thread       the event loop's thread
    weight_sources    a weight update's parts from what a trainer has: tensors, objects, files, actors

docs/rollouts.md has examples."""

from actors.client.client import RolloutClient
from actors.client.rollout import Rollout
from actors.client.weight_sources import put_weights, weight_list, weight_slices

__all__ = ["Rollout", "RolloutClient", "put_weights", "weight_list", "weight_slices"]
