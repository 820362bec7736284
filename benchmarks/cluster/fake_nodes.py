"""Ray's fake nodes, with memory: a node type must declare what an engine reserves, and a raylet measures it itself."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class FakeNodes(FakeMultiNodeProvider):
    """Raylets on the head's machine as nodes, for Ray's autoscaler."""

    def _create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: dict[str, float], labels: Any
    ) -> None:
        measured = {name: amount for name, amount in resources.items() if name != "memory"}
        super()._create_node_with_resources_and_labels(node_config, tags, count, measured, labels)
