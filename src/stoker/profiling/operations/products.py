"""Matrix products, single and batched, as linear layers and their gradients make them."""

from __future__ import annotations

import torch

from stoker.profiling.operations.call import Arguments, Call, Pool
from stoker.profiling.operations.shapes import Limits, limited, multiple, spread

_ATEN = torch.ops.aten
_LAYOUTS = ((False, True), (False, False), (True, False))
"""Which operand lies transposed: in a linear layer, its input's gradient, its weight's gradient."""


def product_calls(dtype: torch.dtype, limits: Limits, num: int) -> list[Call]:
    """`num` shapes from skinny to square, in the three layouts that training uses in turn."""
    calls = []
    usual = spread(num - num // 3, (128, 4096), (96, 3072), (96, 3072))
    for index, (rows, wide, deep) in enumerate([*usual, *spread(num // 3, (32, 8192), (16, 1024), (16, 4096))]):
        layout = _LAYOUTS[index % 3]
        # Widths of models are multiples of what a CPU or GPU multiplies at once, numbers of classes are not.
        columns, depth = (wide, deep) if index % 6 == 5 else (multiple(wide, 32), multiple(deep, 32))
        if index % 6 == 4:
            columns = max(1, columns // 32)
        most_rows = min(limits.flops / 2 / (columns * depth), limits.numel / max(columns, depth))
        samples = max(1, min(rows, int(most_rows)))
        # A weight's gradient sums over the rows of the batch: its depth is the long side.
        shape = (columns, depth, samples) if layout[0] else (samples, columns, depth)
        calls.append(_product(shape, layout, dtype, is_biased=layout == (False, True) and index % 2 == 0))
    return calls


def batched_product_calls(dtype: torch.dtype, limits: Limits, num: int) -> list[Call]:
    """`num` batched products, as attention written out and mixtures of experts make them."""
    calls = []
    ranges = ((2, 256), (16, 512), (16, 1024), (16, 512))
    for index, drawn in enumerate(spread(num, *ranges)):
        sizes = drawn if index % 4 == 3 else (drawn[0], *(multiple(size, 16) for size in drawn[1:]))
        _, rows, columns, depth = sizes
        batch = min(limited(sizes, limits.flops / 2)[0], limited((sizes[0], rows * columns), limits.numel)[0])
        calls.append(_batched(batch, (rows, columns, depth), _LAYOUTS[index % 3], dtype))
    return calls


def thin_product_calls(dtype: torch.dtype, num: int) -> list[Call]:
    """`num` batched products with hardly a column, or hardly a depth: einsum makes them of routing and gating."""
    calls = []
    for index, (batch, rows, wide, thin) in enumerate(spread(num, (8, 512), (32, 512), (2, 256), (1, 8))):
        shape = (rows, thin, wide) if index % 2 else (rows, wide, thin)
        calls.append(_batched(batch, shape, _LAYOUTS[index % 3], dtype))
    return calls


def _product(shape: tuple[int, ...], layout: tuple[bool, bool], dtype: torch.dtype, *, is_biased: bool) -> Call:
    rows, columns, depth = shape

    def arguments(pool: Pool) -> Arguments:
        a = pool.random(rows, depth, dtype=dtype, transposed=layout[0])
        b = pool.random(depth, columns, dtype=dtype, transposed=layout[1])
        return ((pool.random(columns, dtype=dtype), a, b) if is_biased else (a, b)), {}

    return Call(_ATEN.addmm.default if is_biased else _ATEN.mm.default, arguments)


def _batched(batch: int, shape: tuple[int, int, int], layout: tuple[bool, bool], dtype: torch.dtype) -> Call:
    rows, columns, depth = shape

    def arguments(pool: Pool) -> Arguments:
        a = pool.random(batch, rows, depth, dtype=dtype, transposed=layout[0])
        b = pool.random(batch, depth, columns, dtype=dtype, transposed=layout[1])
        return (a, b), {}

    return Call(_ATEN.bmm.default, arguments)
