"""Layouts: the tensors of a quantized weight in a checkpoint, and how they become the tensors of an encoding.

Bytes go to the device as they are and are unpacked there. A tensor's own name replaces the `weight` at the end of the
location's name."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import NamedTuple

import torch

from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.quant.encodings import Encoding, Table, encoding_of
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import DENSE, Location, Shape, StoredTensor, Tensors, TensorSource, read_plain

_FP8, _INT8, _UINT8, _INT32 = (torch.float8_e4m3fn,), (torch.int8,), (torch.uint8,), (torch.int32,)
_SCALES = (torch.bfloat16, torch.float16, torch.float32)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


class BlockTensor(NamedTuple):
    """A tensor with one number for each block of a weight [out, in]."""

    dtypes: tuple[torch.dtype, ...]
    rows: int = 1  # of a block; 0 for all
    columns: int = 1
    transposed: bool = False  # the first dimension of the tensor counts columns
    optional: bool = False
    size: int = 0  # numbers of a block, in a third dimension

    def shape(self, shape: Shape) -> Shape:
        sizes = [-(-size // per) if per else 1 for size, per in zip(shape, (self.rows, self.columns), strict=True)]
        return (*(sizes[::-1] if self.transposed else sizes), *([self.size] if self.size else []))

    def stored(self, shape: Shape) -> StoredTensor:
        """The tensor in a checkpoint, which may lack a dimension of size 1."""
        whole = self.shape(shape)
        if self.rows and self.columns:
            return StoredTensor(whole, self.dtypes, self.optional)
        per = (self.rows, self.columns)[:: -1 if self.transposed else 1]
        squeezed = tuple(size for size, shared in zip(whole, per, strict=True) if shared)
        return StoredTensor(whole, self.dtypes, self.optional, (squeezed, squeezed or (1,)))

    def read(
        self, source: TensorSource, name: str, shape: Shape, part: Part | None, device: torch.device
    ) -> torch.Tensor:
        """Read the blocks of a part of the weight, rows first."""
        own = None
        if part is not None:
            if (self.rows, self.columns)[part.dim]:
                own = self.part(part, shape, name)
                own = own._replace(dim=own.dim ^ self.transposed if len(source.shape(name)) > 1 else 0)
            shape = _shape_of(part, shape)
        tensor = source.tensor(name, source.dtype(name), device, own).reshape(self.shape(shape))
        return tensor.t() if self.transposed else tensor

    def part(self, part: Part, shape: Shape, name: str) -> Part:
        """The blocks of a part of the weight. Raises CallboardError if the part does not consist of whole blocks."""
        per = (self.rows, self.columns)[part.dim]
        if part.start % per or (part.stop % per and part.stop != shape[part.dim]):
            what = ("rows", "columns")[part.dim]
            raise CallboardError(
                f"{name}: a rank's {what} {part.start} to {part.stop} begin or end within {per} that are stored "
                "together; choose a smaller tensor_parallel_size."
            )
        return Part(part.dim, part.start // per, -(-part.stop // per))


class CheckpointLayout(ABC):
    """How weights of one scheme lie in a checkpoint."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        self.scheme, self._encoding = scheme, encoding_of(scheme)

    def encoding(self, shape: Shape) -> Encoding:
        """The encoding of a weight of this shape."""
        return self._encoding

    def block_tensors(self) -> dict[str, BlockTensor]:
        """The tensors by their names in the module, for layouts that do not override `stored` and `read`."""
        return {}

    @abstractmethod
    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Tensors:
        """Values and scales of the encoding, from the tensors of a part of this shape.

        Raises CallboardError if the tensors contradict the config."""

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return {_own_name(location, name): grid.stored(location.shape) for name, grid in self.block_tensors().items()}

    def read(self, source: TensorSource, location: Location, device: torch.device) -> Tensors:
        """The weight, or the parts that the location names, in the encoding."""
        weights = []
        for part in location.parts or (None,):
            shape = location.shape if part is None else _shape_of(part, location.shape)
            tensors = {
                name: grid.read(source, own_name, location.shape, part, device)
                for name, grid in self.block_tensors().items()
                if (own_name := _own_name(location, name)) in source
            }
            try:
                weights.append(self.unpack(tensors, shape))
            except CallboardError as e:
                raise CallboardError(f"{location.name}: {e}") from e
        return weights[0] if len(weights) == 1 else self._encoding.join(weights)

    def _scale(self, *dtypes: torch.dtype) -> BlockTensor:
        return BlockTensor(dtypes or _SCALES, self.scheme.scale_rows, self.scheme.group_size)

    def _per_row(self, scale: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Scales in float32; the scale of a whole tensor is repeated for each row."""
        return scale.float() if self.scheme.scale_rows else scale.float().expand(shape[0], 1).contiguous()

    def _grouped(self, quantized: torch.Tensor, groups: torch.Tensor | None, *shared: torch.Tensor) -> Tensors:
        """A weight with its columns sorted by group, if the scheme is reordered."""
        if groups is None:
            if self.scheme.reordered:
                raise CallboardError("the config has reordered columns, but no tensor holds their groups.")
            return quantized, *shared
        groups, order = (groups - groups.min()).flatten().sort(stable=True)  # groups of a part start at its first group
        columns = torch.arange(len(groups), device=groups.device)
        if not torch.equal(groups, columns // (self.scheme.group_size or len(groups))):
            raise CallboardError("the groups of its columns (g_idx) are not all of group_size columns.")
        if self.scheme.reordered:
            return quantized[:, order], *shared, order
        if not torch.equal(order, columns):
            raise CallboardError("its columns are reordered (g_idx), which desc_act or actorder of the config denies.")
        return quantized, *shared


class Plain(CheckpointLayout):
    """Dense numbers that are quantized on the device as they are read."""

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return DENSE.stored(location)

    def read(self, source: TensorSource, location: Location, device: torch.device) -> Tensors:
        if location.parts and location.parts[0].dim == 1 and not self._encoding.group_size:
            (part,) = location.parts  # each rank uses the scale of the whole row
            quantized, scale = self._encoding.part(self.read(source, location._replace(parts=()), device), part)
            return quantized.contiguous(), scale
        stored = source.dtype(location.name)
        weight = read_plain(source, location, stored if stored in _SCALES else torch.float32, device)
        return self.unpack({"weight": weight}, location.shape)

    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Tensors:
        return self._encoding.encode(tensors["weight"])


class OneByOne(CheckpointLayout):
    """Values of one byte in the order of the weight, with scales in other tensors."""

    def __init__(
        self, scheme: QuantizationScheme, scales: Sequence[str] = ("weight_scale",), factor: float = 1.0
    ) -> None:
        super().__init__(scheme)
        self._names, self._factor = scales, factor  # exporters use different names for scales

    def block_tensors(self) -> dict[str, BlockTensor]:
        scheme = self.scheme
        shared = scheme.scale_rows, scheme.group_size
        of_activations = dict.fromkeys(
            ("input_scale", "input_zero_point", "activation_scale", "weight_format"),
            BlockTensor((*_SCALES, *_INT8, *_UINT8, *_FP8), 0, 0, optional=True),
        )
        return {
            "weight": BlockTensor(_FP8 if scheme.encoding == "fp8" else _INT8),
            **dict.fromkeys(self._names, BlockTensor((*_SCALES, *_EXPONENTS), *shared, optional=len(self._names) > 1)),
            "weight_zero_point": BlockTensor((*_INT8, *_FP8), *shared, optional=scheme.symmetric),
            "weight_g_idx": BlockTensor(_INT32, 0, 1, optional=not scheme.reordered),
            **of_activations,
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Tensors:
        quantized, scale = tensors["weight"], next((tensors[name] for name in self._names if name in tensors), None)
        if scale is None:
            raise CallboardError(f"it has no {' or '.join(self._names)} beside it.")
        if "weight_format" in tensors and int(tensors["weight_format"]):
            raise CallboardError("its weight_format is not 0 (rows in their order), which alone is supported.")
        scale = self._per_row(exponents(scale) if scale.dtype in _EXPONENTS else scale.float() * self._factor, shape)
        groups = tensors.get("weight_g_idx")
        if self.scheme.symmetric:
            return self._grouped(quantized, groups, scale)
        zeros = self._per_row(tensors["weight_zero_point"], shape) + 128
        return self._grouped(quantized.view(torch.uint8) ^ 128, groups, scale, zeros * scale)


class PackedWords(CheckpointLayout):
    """pack-quantized of compressed-tensors: 32-bit words with values along rows, and with zero points down rows."""

    def block_tensors(self) -> dict[str, BlockTensor]:
        scheme, per_word = self.scheme, 32 // self._encoding.bits
        return {
            "weight_packed": BlockTensor(_INT32, 1, per_word),
            "weight_scale": self._scale(),
            "weight_zero_point": BlockTensor(
                _INT32, per_word if scheme.scale_rows else 0, scheme.group_size, optional=scheme.symmetric
            ),
            "weight_g_idx": BlockTensor(_INT32, 0, 1, optional=not scheme.reordered),
        }

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        of_shape = StoredTensor((2,), (torch.int64, torch.int32))
        return super().stored(location) | {_own_name(location, "weight_shape"): of_shape}

    def read(self, source: TensorSource, location: Location, device: torch.device) -> Tensors:
        name = _own_name(location, "weight_shape")
        if (said := tuple(source.tensor(name, torch.int64, torch.device("cpu")).tolist())) != location.shape:
            raise CallboardError(f"{name} says {list(said)}; the checkpoint's config asks for {list(location.shape)}.")
        return super().read(source, location, device)

    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Tensors:
        bits, groups = self._encoding.bits, tensors.get("weight_g_idx")
        quantized = unpack_words(tensors["weight_packed"], bits, shape[1])
        scale = self._per_row(tensors["weight_scale"], shape)
        if self.scheme.symmetric:
            return self._grouped(_centred(quantized, bits), groups, scale)
        zeros = self._per_row(unpack_words(tensors["weight_zero_point"].t(), bits, shape[0]).t(), shape)
        return self._grouped(quantized, groups, scale, zeros * scale)


class Awq(CheckpointLayout):
    """Words of eight values along the outputs of a transposed weight."""

    _ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble i of a word is output [0, 2, 4, 6, 1, 3, 5, 7][i]

    def block_tensors(self) -> dict[str, BlockTensor]:
        columns = self.scheme.group_size
        return {
            "qweight": BlockTensor(_INT32, 8, 1, transposed=True),
            "qzeros": BlockTensor(_INT32, 8, columns, transposed=True),
            "scales": BlockTensor(_SCALES, 1, columns, transposed=True),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Tensors:
        scale = tensors["scales"].float().contiguous()
        quantized, zeros = (
            unpack_words(tensors[name].t(), 4, shape[0]).unflatten(1, (-1, 8))[..., self._ORDER].flatten(1).t()
            for name in ("qweight", "qzeros")
        )
        return quantized.contiguous(), scale, zeros * scale


class Gptq(CheckpointLayout):
    """Words of values down the inputs of a transposed weight, and words of zero points along the outputs."""

    def __init__(self, scheme: QuantizationScheme, less: int) -> None:
        super().__init__(scheme)
        self._less = less  # subtracted from stored zero points

    def block_tensors(self) -> dict[str, BlockTensor]:
        columns, per_word = self.scheme.group_size, 32 // self._encoding.bits
        return {
            "qweight": BlockTensor(_INT32, 1, per_word, transposed=True),
            "qzeros": BlockTensor(_INT32, per_word, columns, transposed=True),
            "scales": BlockTensor(_SCALES, 1, columns, transposed=True),
            "g_idx": BlockTensor(_INT32, 0, 1, optional=not self.scheme.reordered),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Tensors:
        bits = self._encoding.bits
        quantized = unpack_words(tensors["qweight"], bits, shape[1])
        zeros = unpack_words(tensors["qzeros"].t(), bits, shape[0]).t()
        zeros = (zeros + self._less) & (1 << bits) - 1  # 0 less one wraps to the largest value
        scale = tensors["scales"].float().contiguous()
        if not self.scheme.symmetric:
            return self._grouped(quantized, tensors.get("g_idx"), scale, zeros * scale)
        if bool((zeros != 1 << bits - 1).any()):
            raise CallboardError("its qzeros are not symmetric, although the config sets sym.")
        return self._grouped(_centred(quantized, bits), tensors.get("g_idx"), scale)


class Nibbles(CheckpointLayout):
    """fp4 nibbles, the low one first; scales of groups, and perhaps one scale of the tensor."""

    def __init__(
        self,
        scheme: QuantizationScheme,
        quantized: str,
        scale: str,
        of_tensor: str = "",
        divides: bool = False,
        size: int = 0,  # bytes in the third dimension; 0 for two dimensions
    ) -> None:
        super().__init__(scheme)
        self._quantized, self._name, self._of_tensor, self._divides = quantized, scale, of_tensor, divides
        self._grid = BlockTensor(_UINT8, 1, 2 * size or 2, size=size)

    def block_tensors(self) -> dict[str, BlockTensor]:
        block_tensors = {
            self._quantized: self._grid,
            self._name: self._scale(*(_FP8 if self._of_tensor else _EXPONENTS)),
            "input_scale": BlockTensor(_SCALES, 0, 0, optional=True),
            "input_global_scale": BlockTensor(_SCALES, 0, 0, optional=True),
        }
        return block_tensors | ({self._of_tensor: BlockTensor(_SCALES, 0, 0)} if self._of_tensor else {})

    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Tensors:
        quantized = unpack_nibbles(tensors[self._quantized].flatten(1))[:, : shape[1]]
        if not self._of_tensor:
            return quantized, exponents(tensors[self._name])
        scale, of_tensor = tensors[self._name].float(), tensors[self._of_tensor].float()
        return quantized, scale / of_tensor if self._divides else scale * of_tensor


class BitsAndBytes4(CheckpointLayout):
    """Table indices, the high nibble first; 64 numbers of the flattened weight share a scale.

    Nested scales are quantized themselves: bytes are indices of a table, 256 of them share a scale, and an offset is
    added."""

    def __init__(self, scheme: QuantizationScheme, nested: bool) -> None:
        super().__init__(scheme)
        assert isinstance(self._encoding, Table)
        self._table, self._nested = self._encoding.table, nested
        self._state = "weight.quant_state.bitsandbytes__" + scheme.encoding.split()[-1]

    def encoding(self, shape: Shape) -> Encoding:
        return replace(self._encoding, group_size=gcd(self.scheme.group_size, shape[1]))  # a group may span rows

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        blocks = -(-prod(location.shape) // self.scheme.group_size)
        tensors = {
            "weight": StoredTensor((-(-prod(location.shape) // 2), 1), _UINT8),
            "weight.absmax": StoredTensor((blocks,), _UINT8 if self._nested else _SCALES),
            "weight.quant_map": StoredTensor((16,), (torch.float32,)),
            self._state: StoredTensor(None, _UINT8),
        }
        if self._nested:
            tensors["weight.nested_absmax"] = StoredTensor((-(-blocks // 256),), (torch.float32,))
            tensors["weight.nested_quant_map"] = StoredTensor((256,), (torch.float32,))
        return {_own_name(location, name): stored for name, stored in tensors.items()}

    def read(self, source: TensorSource, location: Location, device: torch.device) -> Tensors:
        tensors = {
            name.removeprefix(_own_name(location, "")): source.tensor(name, source.dtype(name), device)
            for name in self.stored(location)
        }
        quantized, scale = self.unpack(tensors, location.shape)
        encoding = self.encoding(location.shape)
        for part in location.parts:
            BlockTensor((), 1, encoding.group_size).part(part, location.shape, location.name)
        weights = [encoding.part((quantized, scale), part) for part in location.parts]
        return encoding.join(weights) if weights else (quantized, scale)

    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Tensors:
        state = json.loads(bytes(tensors[self._state].tolist()))
        said = tuple(state.get("shape", ())), state.get("blocksize"), state.get("nested_blocksize", 256)
        if said != (shape, self.scheme.group_size, 256):
            raise CallboardError(
                f"its quant_state says shape, blocksize and nested_blocksize {said}; {shape}, {self.scheme.group_size} "
                "and 256 are expected."
            )
        if tensors["weight.quant_map"].tolist() != torch.tensor(self._table).tolist():
            raise CallboardError(f"its quant_map is not that of {self.scheme.encoding}.")
        scale = tensors["weight.absmax"]
        if self._nested:
            of_blocks = tensors["weight.nested_absmax"].repeat_interleave(256)[: len(scale)]
            scale = tensors["weight.nested_quant_map"][scale.int()] * of_blocks + state["nested_offset"]
        quantized = unpack_nibbles(tensors["weight"].flatten(), high_first=True)[: prod(shape)].view(shape)
        group_size = self.encoding(shape).group_size
        scale = scale.float().repeat_interleave(self.scheme.group_size // group_size)[: prod(shape) // group_size]
        return quantized, scale.view(shape[0], -1)


def _shape_of(part: Part, shape: Shape) -> Shape:
    sizes = list(shape)
    sizes[part.dim] = part.stop - part.start
    return tuple(sizes)


def _own_name(location: Location, name: str) -> str:
    return location.name.removesuffix("weight") + name


def _centred(quantized: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values as signed ones around 0."""
    return quantized.view(torch.int8) - 8 if bits == 4 else (quantized ^ 128).view(torch.int8)


def unpack_nibbles(data: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """uint8 [..., n] -> its nibbles, uint8 [..., 2 * n]; the low nibble of a byte first, or the high one."""
    words = data.to(torch.int16)  # whole words are faster than bytes two apart
    words = (words >> 4).bitwise_or_(words << 8) if high_first else (words << 4).bitwise_or_(words)
    return words.bitwise_and_(0x0F0F).view(torch.uint8)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [n, m] -> the first `count` 4-bit or 8-bit values of each row, uint8 [n, count], lowest bits first."""
    if words.stride(-1) != 1:
        words = words.clone(memory_format=torch.contiguous_format)
    data = words.view(torch.uint8)
    return (unpack_nibbles(data) if bits == 4 else data)[:, :count]


def exponents(quantized: torch.Tensor) -> torch.Tensor:
    """e8m0 values, which files also store as uint8, as float32 powers of two; 255 is NaN."""
    return quantized.view(torch.float8_e8m0fnu).float()
