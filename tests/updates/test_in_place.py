"""Copies onto the tensors of another object of the same structure."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from runtime.base.types import CallboardError
from runtime.kernels.numerics import Numerics
from runtime.updates.apply import taken
from runtime.updates.in_place import InPlace, tensors_of
from runtime.worker.sources import CheckpointSource
from tests.support.models.tower_cases import CASES, random_image, save_tower_model
from tests.support.models.weight_updates import changed, tensors_in, write_changed


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def product(self) -> torch.Tensor:
        return self.weight


@dataclass(frozen=True)
class Holder:
    parts: dict[str, object]
    count: int


def holder(value: float, shared: object) -> Holder:
    """Tensors in every kind of object that layers consist of."""
    tensors = [torch.full((2, 3), value + i) for i in range(6)]
    own = Slotted(tensors[0])

    def closure(x: torch.Tensor = tensors[1]) -> torch.Tensor:
        return x + tensors[2]

    parts = {
        "closure": closure, "partial": partial(torch.add, tensors[3], other=tensors[4]), "method": own.product,
        "list": [own, (tensors[5],), None], "shared": shared,
    }  # fmt: skip
    return Holder(parts, 3)


def test_every_tensor_takes_the_other_numbers_at_its_place():
    shared = torch.zeros(2)
    old, new = holder(0.0, shared), holder(10.0, shared)
    places = [x.data_ptr() for x in tensors_of(old)]
    InPlace().copy_onto(old, new, "holder")
    assert [x.data_ptr() for x in tensors_of(old)] == places
    pairs = list(zip(tensors_of(old), tensors_of(new), strict=True))
    assert len(pairs) == 7
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("case", CASES)
def test_an_image_encoder_keeps_its_memory(case, tmp_path):
    """On a GPU that memory is given back in sleep."""
    save_tower_model(tmp_path / "first", case)
    write_changed(tmp_path / "first", changed(tensors_in(tmp_path / "first")), tmp_path / "second")
    numerics = Numerics(torch.float32, torch.device("cpu"), "torch", packed=False, deterministic=True)
    old, new = (CheckpointSource(tmp_path / name).load_tower(numerics) for name in ("first", "second"))
    image, places = random_image(CASES[case].sizes[0], 1)[0], [x.data_ptr() for x in tensors_of(old)]
    want = new.encode(image, torch.from_numpy)
    assert not torch.equal(old.encode(image, torch.from_numpy), want)
    assert taken(old, new, in_place=False) is new
    found = taken(old, new, in_place=True)
    assert torch.equal(found.encode(image, torch.from_numpy), want)
    has_limits = found is new  # they are plain numbers
    assert has_limits == (case == "gemma4, clipped")
    assert has_limits or [x.data_ptr() for x in tensors_of(found)] == places


def test_a_shared_tensor_is_copied_once():
    weight, new = torch.zeros(4), torch.ones(4)
    in_place = InPlace()
    in_place.copy_onto([weight], [new], "embedding")
    weight.fill_(5.0)
    in_place.copy_onto({"head": weight}, {"head": new}, "head")
    assert weight.tolist() == [5.0] * 4


def test_objects_of_another_form_are_refused():
    zeros = torch.zeros(3)
    for old, new in (
        ([zeros], [torch.zeros(4)]), ([zeros], [zeros, zeros.clone()]), ({"a": zeros}, {"b": zeros.clone()}),
        ([zeros, 1], [zeros.clone(), 2]), ((zeros,), [zeros.clone()]), ([zeros], [None]),
        ([zeros], [zeros.double()]),
    ):  # fmt: skip
        with pytest.raises(CallboardError, match="bug in Callboard"):
            InPlace().copy_onto(old, new, "x")
