"""Names of a tower's tensors, from its tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from runtime.base.model.tower_spec import TowerSpec

LIMITS = ("input_min", "input_max", "output_min", "output_max")  # scalars of a map
_LAYER = re.compile(r"^(layers\.|deepstack\.)(\d+)\.")


def short_names(spec: TowerSpec) -> dict[str, str]:
    """Return the tensor of each parameter, without wrappers."""
    return {parameter: named(spec.names, parameter) for parameter in spec.shapes()}


def named(names: Mapping[str, str], parameter: str, deepstack: Sequence[int] = ()) -> str:
    """Return a parameter's name by a table. `deepstack` has the layers that replace indices of deepstack."""
    match = _LAYER.match(parameter)
    layer = int(match[2]) if match else 0
    part = _LAYER.sub(r"\1{}.", parameter)
    if match and match[1] == "deepstack." and deepstack:
        layer = deepstack[layer]
    if part in names:
        return names[part].format(layer)
    part, suffix = part.rsplit(".", 1)  # a map's name precedes .weight and .bias
    return f"{names[part].format(layer)}.{suffix}"
