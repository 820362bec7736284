"""The client for other jobs of the same Ray: rollouts, scores and new weights, without HTTP.

    client            RolloutClient: blocking calls and iterators over an event loop of its own
    batch             the requests of one call in flight, and the rollouts that have ended
    rollout           Rollout: one finished output
    engines           finds the engines of an application; streams that are read once, at their end
    join              connects the process to the running Ray
    loop_thread       the thread of the event loop
    weight_sources    the parts of a weight update from what a trainer has: tensors, objects, files, actors

docs/rollouts.md has examples.
"""

from actors.client.client import RolloutClient
from actors.client.rollout import Rollout
from actors.client.weight_sources import put_weights, weight_list, weight_slices

__all__ = ["Rollout", "RolloutClient", "put_weights", "weight_list", "weight_slices"]
