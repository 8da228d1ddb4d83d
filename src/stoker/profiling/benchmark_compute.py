"""Compute-bound calls of the micro-benchmark: matrix products, attention, recurrent layers, convolutions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from stoker.profiling.benchmark_calls import Arguments, Call, OperandPool, ShapeLimits, aten, limited, multiple, spread

_ATEN = torch.ops.aten
_LAYOUTS = ((False, True), (False, False), (True, False))
"""Transposed operands (first, second) of a linear layer, its input's gradient, and its weight's gradient."""


def product_calls(dtype: torch.dtype, limits: ShapeLimits, num: int) -> list[Call]:
    """Matrix products of `num` shapes from skinny to square, in turn in the three layouts of training."""
    calls = []
    usual = spread(num - num // 3, (128, 4096), (96, 3072), (96, 3072))
    for index, (rows, wide, deep) in enumerate([*usual, *spread(num // 3, (32, 8192), (16, 1024), (16, 4096))]):
        layout = _LAYOUTS[index % 3]
        # Widths of models are multiples of a processor's vector width, numbers of classes are not.
        columns, depth = (wide, deep) if index % 6 == 5 else (multiple(wide, 32), multiple(deep, 32))
        if index % 6 == 4:
            columns = max(1, columns // 32)
        most_rows = min(limits.flops / 2 / (columns * depth), limits.numel / max(columns, depth))
        samples = max(1, min(rows, int(most_rows)))
        # A weight's gradient sums over the rows of the batch: its depth is the long side.
        shape = (columns, depth, samples) if layout[0] else (samples, columns, depth)
        calls.append(_product(shape, layout, dtype, is_biased=layout == (False, True) and index % 2 == 0))
    return calls


def batched_product_calls(dtype: torch.dtype, limits: ShapeLimits, num: int) -> list[Call]:
    """`num` batched products, as in explicit attention and mixtures of experts."""
    calls = []
    ranges = ((2, 256), (16, 512), (16, 1024), (16, 512))
    for index, drawn in enumerate(spread(num, *ranges)):
        sizes = drawn if index % 4 == 3 else (drawn[0], *(multiple(size, 16) for size in drawn[1:]))
        _, rows, columns, depth = sizes
        batch = min(limited(sizes, limits.flops / 2)[0], limited((sizes[0], rows * columns), limits.numel)[0])
        calls.append(_batched(batch, (rows, columns, depth), _LAYOUTS[index % 3], dtype))
    return calls


def thin_product_calls(dtype: torch.dtype, num: int) -> list[Call]:
    """`num` batched products with few columns or a small depth, as einsum makes them of routing and gating."""
    calls = []
    for index, (batch, rows, wide, thin) in enumerate(spread(num, (8, 512), (32, 512), (2, 256), (1, 8))):
        shape = (rows, thin, wide) if index % 2 else (rows, wide, thin)
        calls.append(_batched(batch, shape, _LAYOUTS[index % 3], dtype))
    return calls


def _product(shape: tuple[int, ...], layout: tuple[bool, bool], dtype: torch.dtype, *, is_biased: bool) -> Call:
    rows, columns, depth = shape

    def arguments(pool: OperandPool) -> Arguments:
        a = pool.random(rows, depth, dtype=dtype, transposed=layout[0])
        b = pool.random(depth, columns, dtype=dtype, transposed=layout[1])
        return ((pool.random(columns, dtype=dtype), a, b) if is_biased else (a, b)), {}

    return Call(_ATEN.addmm.default if is_biased else _ATEN.mm.default, arguments)


def _batched(batch: int, shape: tuple[int, int, int], layout: tuple[bool, bool], dtype: torch.dtype) -> Call:
    rows, columns, depth = shape

    def arguments(pool: OperandPool) -> Arguments:
        a = pool.random(batch, rows, depth, dtype=dtype, transposed=layout[0])
        b = pool.random(batch, depth, columns, dtype=dtype, transposed=layout[1])
        return (a, b), {}

    return Call(_ATEN.bmm.default, arguments)


_SLOWER = 4
"""Approximate time of attention over that of a matrix product of as many FLOPs [1]."""


def attention_calls(dtype: torch.dtype, limits: ShapeLimits, num: int, device_kind: str) -> list[Call]:
    """Attention of `num` shapes with and without a causal mask, by PyTorch's kernel for this kind of device."""
    calls = []
    for index, (images, heads, tokens, width) in enumerate(spread(num, (1, 64), (2, 12), (32, 512), (24, 112))):
        head_dim, is_causal = multiple(width, 32 if index % 3 else 16), index % 2 == 0
        # Windows of text are powers of two or nearly; patches of an image and a class token are not.
        length = tokens if index % 3 == 1 else multiple(tokens, 32)
        smallest = limited((images, 4 * heads * length**2 * head_dim), limits.flops / _SLOWER)[0]
        shape = (smallest, heads, length, head_dim)
        if device_kind == "cpu":
            calls += _attention(shape, dtype, "_scaled_dot_product_flash_attention_for_cpu", is_causal=is_causal)
        elif dtype is not torch.float32:
            calls += _attention(shape, dtype, "_scaled_dot_product_flash_attention", is_causal=is_causal)
    return calls


def recurrent_calls(limits: ShapeLimits, num: int) -> list[Call]:
    """`num` LSTM layers over whole sequences, by oneDNN, as PyTorch runs them on a CPU."""
    calls = []
    for length, batch, size, hidden in spread(num, (12, 128), (4, 64), (24, 384), (32, 384)):
        batch_size = limited((batch, 8 * length * hidden * (size + hidden)), limits.flops)[0]
        calls += _lstm(length, batch_size, size, hidden)
    return calls


def _attention(shape: tuple[int, int, int, int], dtype: torch.dtype, name: str, *, is_causal: bool) -> list[Call]:
    images, heads, length, width = shape
    forward = aten(name)

    def inputs(pool: OperandPool) -> Arguments:
        # [B, H, T, E] in the layout of a linear layer's output: tokens before heads in memory.
        tensors = [pool.random(images, length, heads, width, dtype=dtype).transpose(1, 2) for _ in range(3)]
        return (*tensors, 0.0, is_causal), {}

    def gradients(pool: OperandPool) -> Arguments:
        (q, k, v, *_), _ = inputs(pool)
        out, logsumexp, *saved = forward(q, k, v, 0.0, is_causal)
        # On a GPU also: cumulative lengths and longest ones of queries and keys, seed and offset, a debug mask.
        lengths, random_state = saved[:4], saved[4:6]
        return (torch.randn_like(out), q, k, v, out, logsumexp, *lengths, 0.0, is_causal, *random_state), {}

    return [Call(forward, inputs), Call(aten(f"{name}_backward"), gradients)]


def _lstm(length: int, batch: int, size: int, hidden: int) -> list[Call]:
    forward = _ATEN.mkldnn_rnn_layer.default
    lstm = 2  # the mode

    def inputs(pool: OperandPool) -> Arguments:
        shapes = ((4 * hidden, size), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
        weights = [pool.random(*shape) for shape in shapes]
        states = (pool.random(batch, hidden), pool.random(batch, hidden))
        x = pool.random(length, batch, size)
        return (x, *(w * 0.05 for w in weights), *states, False, [], lstm, hidden, 1, True, False, False, True), {}

    def gradients(pool: OperandPool) -> Arguments:
        args, _ = inputs(pool)
        output, hy, cy, workspace = forward(*args)
        grads = (torch.randn_like(output), torch.randn_like(hy), torch.randn_like(cy))
        settings: tuple[object, ...] = (False, lstm, hidden, 1, True, True, False, [], False, workspace)
        return (*args[:7], output, hy, cy, *grads, *settings), {}

    return [Call(forward, inputs), Call(_ATEN.mkldnn_rnn_layer_backward.default, gradients)]


_KINDS = ((3, 1, 1), (1, 1, 4), (3, 1, 2), (3, 2, 2), (1, 1, 0.25), (3, 1, 1), (1, 2, 2), (3, 1, 0.5), (5, 1, 1))
"""Kernel size, stride, and ratio of output to input channels."""


@dataclass(frozen=True)
class ConvolutionShape:
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
        pixels = math.prod([self.size if self.is_transposed else self.size / self.stride] * self.dims)
        area = math.prod([self.kernel] * self.dims)
        return 2.0 * self.images * pixels * area * self.channels * self.out / self.groups

    @property
    def largest_numel(self) -> float:
        """Number of elements of the larger of input and output [elements]."""
        out_size = self.size * self.stride if self.is_transposed else self.size / self.stride
        inputs, outputs = (math.prod([float(size)] * self.dims) for size in (self.size, out_size))
        return self.images * max(self.channels * inputs, self.out * outputs)

    @property
    def dims(self) -> int:
        """Number of spatial dimensions [dimensions]."""
        return 1 if self.is_1d else 2


def convolution_calls(dtype: torch.dtype, limits: ShapeLimits, num: int, *, channels_last: bool) -> list[Call]:
    """Forward and backward of `num` dense shapes, and of a few of the other kinds."""
    forward, backward = [], []
    for shape in (*_dense(num), *_special(num // 2)):
        excess = max(shape.flops / limits.flops, shape.largest_numel / limits.numel)
        limited_shape = replace(shape, images=max(1, min(shape.images, int(shape.images / excess))))
        is_last = channels_last and not shape.is_1d
        forward.append(_forward(limited_shape, dtype, channels_last=is_last))
        backward.append(_backward(limited_shape, dtype, channels_last=is_last))
    return [*forward, *backward]


def _dense(num: int) -> list[ConvolutionShape]:
    shapes = []
    for index, (channels, size, images) in enumerate(spread(num, (16, 384), (5, 64), (8, 256))):
        kernel, stride, wider = _KINDS[index % len(_KINDS)]
        # Widths of models are multiples, or nearly, of a processor's vector width.
        of = 16 if index % 4 else 8
        whole = multiple(channels, of)
        shapes.append(ConvolutionShape(images, whole, multiple(round(whole * wider), of), size, kernel, stride))
    # A fraction of a vector register in channels: two thirds of the rate of others.
    for channels, size, images in spread(4, (24, 120), (6, 56), (8, 64)):
        ragged = multiple(channels, 16) + 8
        shapes.append(ConvolutionShape(images, ragged, ragged, size, 3))
    # First layers have few channels and large images.
    first = (
        ConvolutionShape(32, 3, 48, 96, 7, 2),
        ConvolutionShape(64, 3, 24, 40, 3),
        ConvolutionShape(64, 1, 16, 28, 3),
        ConvolutionShape(16, 3, 256, 112, 16, 16),
    )
    return [*shapes, *first]


def _special(num: int) -> list[ConvolutionShape]:
    shapes = []
    for index, (channels, size, images) in enumerate(spread(num, (16, 512), (6, 64), (4, 128))):
        kernel, stride = ((3, 1), (3, 2), (5, 1))[index % 3]
        whole = multiple(channels, 8)
        shapes.append(ConvolutionShape(images, whole, whole, size, kernel, stride, groups=whole))
    for channels, out, length, kernel in ((1, 24, 8000, 15), (24, 48, 2500, 7), (96, 96, 700, 5)):
        shapes.append(ConvolutionShape(16, channels, out, length, kernel, 2, is_1d=True))
    transposed = (
        ConvolutionShape(8, 96, 48, 14, 2, 2, is_transposed=True),
        ConvolutionShape(8, 32, 16, 36, 2, 2, is_transposed=True),
    )
    return [*shapes, *transposed]


def _operands(
    shape: ConvolutionShape, pool: OperandPool, dtype: torch.dtype, *, channels_last: bool
) -> tuple[torch.Tensor, ...]:
    dims = shape.dims
    x = pool.random(shape.images, shape.channels, *[shape.size] * dims, dtype=dtype, channels_last=channels_last)
    outer = (shape.channels, shape.out) if shape.is_transposed else (shape.out, shape.channels // shape.groups)
    weight = pool.random(*outer, *[shape.kernel] * dims, dtype=dtype, channels_last=channels_last)
    return x, weight


def _settings(shape: ConvolutionShape) -> tuple[object, ...]:
    dims = shape.dims
    padding = 0 if shape.is_transposed or shape.kernel == shape.stride else shape.kernel // 2
    return [shape.stride] * dims, [padding] * dims, [1] * dims, shape.is_transposed, [0] * dims, shape.groups


def _forward(shape: ConvolutionShape, dtype: torch.dtype, *, channels_last: bool) -> Call:
    def arguments(pool: OperandPool) -> Arguments:
        x, weight = _operands(shape, pool, dtype, channels_last=channels_last)
        return (x, weight, None, *_settings(shape)), {}

    return Call(_ATEN.convolution.default, arguments)


def _backward(shape: ConvolutionShape, dtype: torch.dtype, *, channels_last: bool) -> Call:
    settings = _settings(shape)
    # The first layer's input needs no gradient.
    output_mask = [shape.channels > 3, True, False]

    def arguments(pool: OperandPool) -> Arguments:
        x, weight = _operands(shape, pool, dtype, channels_last=channels_last)
        out = _ATEN.convolution.default(x.to("meta"), weight.to("meta"), None, *settings)
        gradient = pool.random(*out.shape, dtype=dtype, channels_last=channels_last)
        return (gradient, x, weight, None, *settings, output_mask), {}

    return Call(_ATEN.convolution_backward.default, arguments)
