"""Weight formats: what a checkpoint says about its weights -> how they are read, held and multiplied with.

`format.py` says what a format is, `dense.py` is the one of plain numbers and has what is derived for a whole model.
Torch is not imported here: the checks of a config.json need the names of the methods alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.quant.format import WeightFormat

# quant_method of a config.json's quantization_config -> a function of that object, which returns the format of a
# parameter by its name, None for one that stays dense. It is asked for weights of linear maps; the parts of a fused
# map, such as q, k and v, need one format.
METHODS: dict[str, Callable[[Mapping[str, Any]], Callable[[str], WeightFormat | None]]] = {}
