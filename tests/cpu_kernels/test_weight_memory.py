"""Memory of weights: tensors keep apart, and new ones take the memory of ended ones where that is wanted."""

import gc

import torch

from runtime.kernels.linear import weight_memory


def test_tensors_keep_apart():
    shapes = [(3, 5), (0, 4), (1000, 7), (1,), (17 << 20,), (90 << 20,)]
    tensors = [weight_memory.empty(shape, torch.uint8).fill_(i) for i, shape in enumerate(shapes)]
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors if tensor.numel())


def test_only_a_recycling_context_takes_memory_again():
    def addresses(count: int) -> list[int]:
        found = []
        for _ in range(count):
            tensor = weight_memory.empty((1 << 20,), torch.float32)
            found.append(tensor.data_ptr())
            del tensor
        return found

    gc.collect()
    with weight_memory.recycling():
        first = weight_memory.empty((1 << 20,), torch.float32)
        view, place = first[5:], first.data_ptr()
        del first
        assert place not in addresses(3)  # a view is left
        del view
        assert set(addresses(3)) <= {place, *addresses(1)}
    assert len(set(addresses(3))) == 3
