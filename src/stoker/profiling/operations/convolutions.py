"""Convolutions and their gradients: dense, strided, of each channel alone, in one and two dimensions, transposed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stoker.profiling.operations.call import Arguments, Call, Pool
from stoker.profiling.operations.shapes import Limits, multiple, spread

_ATEN = torch.ops.aten


_KINDS = ((3, 1, 1), (1, 1, 4), (3, 1, 2), (3, 2, 2), (1, 1, 0.25), (3, 1, 1), (1, 2, 2), (3, 1, 0.5), (5, 1, 1))
"""Kernel, stride, and how many times as many channels come out."""


@dataclass(frozen=True)
class Shape:
    """A convolution of `images` of `size` × `size` (or `size` alone, in one dimension)."""

    images: int
    channels: int
    out: int
    size: int
    kernel: int
    stride: int = 1
    groups: int = 1
    is_1d: bool = False
    is_transposed: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        pixels = _power(self.size if self.is_transposed else self.size / self.stride, self._dims)
        return 2.0 * self.images * pixels * _power(self.kernel, self._dims) * self.channels * self.out / self.groups

    @property
    def largest_numel(self) -> float:
        """Elements of the larger of input and output."""
        out_size = self.size * self.stride if self.is_transposed else self.size / self.stride
        return self.images * max(self.channels * _power(self.size, self._dims), self.out * _power(out_size, self._dims))

    @property
    def _dims(self) -> int:
        return 1 if self.is_1d else 2


def _power(size: float, dims: int) -> float:
    return size if dims == 1 else size * size


def convolution_calls(dtype: torch.dtype, limits: Limits, num: int, *, channels_last: bool) -> list[Call]:
    """Forward and backward of `num` dense shapes, and of a few of the other kinds."""
    shapes = [_small_enough(shape, limits) for shape in (*_dense(num), *_special(num // 2))]
    kinds = [(shape, channels_last and not shape.is_1d) for shape in shapes]
    forward = [_forward(shape, dtype, channels_last=last) for shape, last in kinds]
    return [*forward, *(_backward(shape, dtype, channels_last=last) for shape, last in kinds)]


def _dense(num: int) -> list[Shape]:
    shapes = []
    for index, (channels, size, images) in enumerate(spread(num, (16, 384), (5, 64), (8, 256))):
        kernel, stride, wider = _KINDS[index % len(_KINDS)]
        # Widths of models are multiples of what a CPU or GPU multiplies at once, or nearly.
        of = 16 if index % 4 else 8
        whole = multiple(channels, of)
        shapes.append(Shape(images, whole, multiple(round(whole * wider), of), size, kernel, stride))
    # Channels that are no whole number of vector registers: two thirds of the rate of others.
    for channels, size, images in spread(4, (24, 120), (6, 56), (8, 64)):
        ragged = multiple(channels, 16) + 8
        shapes.append(Shape(images, ragged, ragged, size, 3))
    # First layers have few channels and large images.
    first = (
        Shape(32, 3, 48, 96, 7, 2),
        Shape(64, 3, 24, 40, 3),
        Shape(64, 1, 16, 28, 3),
        Shape(16, 3, 256, 112, 16, 16),
    )
    return [*shapes, *first]


def _special(num: int) -> list[Shape]:
    shapes = []
    for index, (channels, size, images) in enumerate(spread(num, (16, 512), (6, 64), (4, 128))):
        kernel, stride = ((3, 1), (3, 2), (5, 1))[index % 3]
        whole = multiple(channels, 8)
        shapes.append(Shape(images, whole, whole, size, kernel, stride, groups=whole))
    for channels, out, length, kernel in ((1, 24, 8000, 15), (24, 48, 2500, 7), (96, 96, 700, 5)):
        shapes.append(Shape(16, channels, out, length, kernel, 2, is_1d=True))
    transposed = (Shape(8, 96, 48, 14, 2, 2, is_transposed=True), Shape(8, 32, 16, 36, 2, 2, is_transposed=True))
    return [*shapes, *transposed]


def _small_enough(shape: Shape, limits: Limits) -> Shape:
    """With fewer images where it would be more than the limits."""
    too_much = max(shape.flops / limits.flops, shape.largest_numel / limits.numel)
    return replace(shape, images=max(1, min(shape.images, int(shape.images / too_much))))


def _operands(shape: Shape, pool: Pool, dtype: torch.dtype, *, channels_last: bool) -> tuple[torch.Tensor, ...]:
    dims = 1 if shape.is_1d else 2
    x = pool.random(shape.images, shape.channels, *[shape.size] * dims, dtype=dtype, channels_last=channels_last)
    outer = (shape.channels, shape.out) if shape.is_transposed else (shape.out, shape.channels // shape.groups)
    weight = pool.random(*outer, *[shape.kernel] * dims, dtype=dtype, channels_last=channels_last)
    return x, weight


def _settings(shape: Shape) -> tuple[object, ...]:
    dims = 1 if shape.is_1d else 2
    padding = 0 if shape.is_transposed or shape.kernel == shape.stride else shape.kernel // 2
    return [shape.stride] * dims, [padding] * dims, [1] * dims, shape.is_transposed, [0] * dims, shape.groups


def _forward(shape: Shape, dtype: torch.dtype, *, channels_last: bool) -> Call:
    def arguments(pool: Pool) -> Arguments:
        x, weight = _operands(shape, pool, dtype, channels_last=channels_last)
        return (x, weight, None, *_settings(shape)), {}

    return Call(_ATEN.convolution.default, arguments)


def _backward(shape: Shape, dtype: torch.dtype, *, channels_last: bool) -> Call:
    settings = _settings(shape)
    # The first layer's input needs no gradient.
    wanted = [shape.channels > 3, True, False]

    def arguments(pool: Pool) -> Arguments:
        x, weight = _operands(shape, pool, dtype, channels_last=channels_last)
        out = _ATEN.convolution.default(x.to("meta"), weight.to("meta"), None, *settings)
        gradient = pool.random(*out.shape, dtype=dtype, channels_last=channels_last)
        return (gradient, x, weight, None, *settings, wanted), {}

    return Call(_ATEN.convolution_backward.default, arguments)
