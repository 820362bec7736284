"""Tower: one image encoder for all families, described by a TowerSpec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from runtime.base.images import Image
from runtime.base.model.tower_spec import Step, TowerSpec
from runtime.kernels.numerics import Numerics
from runtime.models.towers.attention import PictureAttention
from runtime.models.towers.positions import learned_positions
from runtime.models.towers.projectors import ACTIVATIONS, RESHAPES, FeedForward, Map, Norm, Operation, chain
from runtime.models.towers.tower_tensors import ReadParameter, draw, read_from
from runtime.quant.weight_format import TensorSource

_TILES_AT_ONCE = 8  # tiles a pass on a GPU; a CPU's caches hold one


class _Layer(NamedTuple):
    before: Operation  # norm before attention
    qkv: tuple[Map, ...]  # one, or three
    head_norms: tuple[Operation, ...]  # norms of q, k and v; empty without norms
    out: tuple[Operation, ...]  # the map after attention, then its norm or scale
    feed_forward: tuple[Operation, ...]  # a norm, two or three maps, then a norm or scale


class Tower:
    """An image encoder and its projector. One image is computed at a time, so that its bits depend on it alone."""

    def __init__(self, spec: TowerSpec, numerics: Numerics, read: ReadParameter) -> None:
        self.spec, self._numerics = spec, numerics
        build = _Builder(spec, read)
        self._patch = build.map("patch", spec.patch_bias)
        self._positions = read("positions") if spec.position_shape else None
        self._class_token = read("class_token") if spec.class_token else None
        self._patch_norm = build.norm("patch_norm") if spec.patch_norm else None
        self._attention = PictureAttention(spec, numerics.backend)
        self._layers = [build.layer(f"layers.{i}.") for i in range(spec.num_layers)]
        self._projector = build.steps(spec.projector)
        self._deepstack = {layer: build.steps(spec.deepstack_projector, i) for i, layer in enumerate(spec.deepstack)}
        mean, std = (torch.tensor(values, dtype=torch.float32) for values in (spec.mean, spec.std))
        if spec.doubles_pixels:
            mean, std = mean + 0.5 * std, 0.5 * std
        self._factor, self._offset = (x.to(numerics.device) for x in (1 / (255 * std), mean / std))

    @torch.inference_mode()
    def encode(self, image: Image, upload: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy) -> torch.Tensor:
        """[num_embeddings, spec.width] of an image, its pictures in order, in the compute dtype.

        `upload` copies pixels to the device."""
        data = upload(np.frombuffer(bytearray(image.pixels), np.uint8))
        sizes = [height * width * 3 for height, width in image.sizes]
        pictures = list(zip(image.sizes, data.split(sizes), strict=True))
        at_once = 1 if self._numerics.device.type == "cpu" else _TILES_AT_ONCE
        embeddings = []
        for (height, width), group in groupby(pictures, key=lambda picture: picture[0]):
            same = [pixels for _, pixels in group]
            for start in range(0, len(same), at_once):
                pixels = torch.stack(same[start : start + at_once]).to(self._numerics.device)
                embeddings.append(self._encoded(pixels.view(-1, height, width, 3)))
        return torch.cat(embeddings)

    def _encoded(self, pixels: torch.Tensor) -> torch.Tensor:
        """[pictures, height, width, 3] -> [all embeddings, spec.width]."""
        spec, (pictures, height, width, _) = self.spec, pixels.shape
        rows, columns, side = height // spec.patch_size, width // spec.patch_size, spec.patch_size
        x = pixels.float() * self._factor - self._offset
        x = x.view(pictures, rows, side, columns, side, 3).permute(0, 1, 3, 5, 2, 4)
        h = self._patch(x.reshape(pictures, rows * columns, -1))
        if self._patch_norm is not None:
            h = self._patch_norm(h)
        h = self._placed(h, rows, columns)
        turn = self._attention.turn(pictures, rows, columns, h.device)
        grid, outputs = (pictures, rows, columns, spec.hidden_size), []
        for i, layer in enumerate(self._layers):
            x = layer.before(h)
            mixed = self._attention([part(x) for part in layer.qkv], layer.head_norms, turn)
            h = h + chain(layer.out, mixed)
            h = h + chain(layer.feed_forward, h)
            if (steps := self._deepstack.get(i)) is not None:
                outputs.append(chain(steps, h.view(grid)).flatten(0, 2))
        if spec.class_token:
            h = h[:, 1:]
        return torch.cat((chain(self._projector, h.reshape(grid)).flatten(0, 2), *outputs), 1)

    def _placed(self, h: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Patches with their learned positions, after the class token if there is one."""
        if (table := self._positions) is None:
            return h
        if self._class_token is not None:
            first, table = self._class_token + table[0], table[1:]
        h = h + learned_positions(self.spec, table, rows, columns).flatten(0, 1).to(h.dtype)
        return h if self._class_token is None else torch.cat((first.expand(len(h), 1, -1), h), 1)


class _Builder:
    """Makes the parts of a tower from its parameters."""

    def __init__(self, spec: TowerSpec, read: ReadParameter) -> None:
        self.spec, self.read = spec, read

    def map(self, name: str, bias: bool) -> Map:
        return Map(self.read(f"{name}.weight"), self.read(f"{name}.bias") if bias else None, self.read.limits(name))

    def norm(self, name: str) -> Norm:
        bias = self.read(f"{name}.bias") if self.spec.norm == "norm" else None
        return Norm(self.read(f"{name}.weight"), bias, self.spec.norm_eps)

    def layer(self, prefix: str) -> _Layer:
        spec = self.spec
        qkv = tuple(
            self.map(prefix + part, spec.qkv_bias) for part in (("qkv",) if spec.joint_qkv else ("q", "k", "v"))
        )
        head_norms: tuple[Operation, ...] = ()
        if spec.qk_norm:
            weights = self.read(f"{prefix}q_norm.weight"), self.read(f"{prefix}k_norm.weight"), None
            head_norms = tuple(Norm(weight, None, spec.norm_eps) for weight in weights)
        out: tuple[Operation, ...] = (
            self.map(f"{prefix}out", spec.bias),
            *self._added(f"{prefix}post_norm1", f"{prefix}scale1"),
        )
        feed_forward: tuple[Operation, ...] = (
            self.norm(f"{prefix}norm2"),
            self._feed_forward(prefix, spec.gated, spec.bias),
            *self._added(f"{prefix}post_norm2", f"{prefix}scale2"),
        )
        return _Layer(self.norm(f"{prefix}norm1"), qkv, head_norms, out, feed_forward)

    def _feed_forward(self, prefix: str, gated: bool, bias: bool) -> FeedForward:
        gate = self.map(f"{prefix}gate", bias) if gated else None
        up, down = (self.map(prefix + name, bias) for name in ("up", "down"))
        return FeedForward(gate, up, down, ACTIVATIONS[self.spec.activation])

    def _added(self, norm: str, scale: str) -> list[Operation]:
        """What follows a layer's part before it is added."""
        operations: list[Operation] = [self.norm(norm)] if self.spec.post_norms else []
        return operations + ([partial(torch.mul, self.read(scale))] if self.spec.layer_scales else [])

    def steps(self, steps: Sequence[Step], index: int = 0) -> list[Operation]:
        return [self._step(step._replace(name=step.name.format(index))) for step in steps]

    def _step(self, step: Step) -> Operation:
        if step.op in ("norm", "rms"):
            weight = self.read(f"{step.name}.weight") if step.name else None
            return Norm(weight, self.read(f"{step.name}.bias") if step.bias else None, step.eps)
        if step.op == "rms_plus_one":
            return Norm(self.read(f"{step.name}.weight").float() + 1.0, None, step.eps)
        if step.op == "matmul":
            return Map(self.read(f"{step.name}.weight").T.contiguous(), None)
        if step.op == "linear":
            return self.map(step.name, step.bias)
        if step.op == "gated":
            return self._feed_forward(f"{step.name}.", gated=True, bias=False)
        if step.op == "standard":
            bias, factor = (self.read(f"{step.name}.{part}").float() for part in ("bias", "weight"))
            return lambda x: (x - bias) * factor
        return ACTIVATIONS[step.op] if step.op in ACTIVATIONS else partial(RESHAPES[step.op], self.spec.merge)


def load_tower(source: TensorSource, spec: TowerSpec, numerics: Numerics) -> Tower:
    """Return a tower with a checkpoint's weights. All tensors are checked before any is read.

    Raises CallboardError if one is missing, or has a wrong shape."""
    return Tower(spec, numerics, read_from(source, spec, numerics))


def draw_tower(spec: TowerSpec, numerics: Numerics, seed: int = 0) -> Tower:
    """Return a tower with seeded random weights, for tests and benchmarks."""
    return Tower(spec, numerics, draw(spec, numerics, seed))
