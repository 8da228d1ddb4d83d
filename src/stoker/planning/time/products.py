"""Which matrix products an operation is made of: sizes (batch, rows, columns, depth)."""

from __future__ import annotations

import math

from stoker.records.trace import Operation

Sizes = tuple[int, int, int, int]

SINGLE = ("mm", "addmm", "linear", "_addmm_activation")
BATCHED = ("bmm", "baddbmm", "_grouped_mm")


def product_sizes(operation: Operation) -> Sizes | None:
    """Of a matrix product; None where its shapes do not tell."""
    matrices = [tensor.shape for tensor in operation.inputs if len(tensor.shape) >= 2]
    if operation.name == "linear" and len(matrices) >= 2:
        (*rows, depth), (columns, _) = matrices[:2]
        return 1, math.prod(rows), columns, depth
    if len(matrices) < 2:
        return None
    a, b = matrices[-2:]
    if operation.name == "_grouped_mm":
        return _grouped_sizes(a, b, operation.outputs[0].shape)
    if operation.name in BATCHED and len(a) == len(b) == 3:
        return a[0], a[1], b[2], a[2]
    return (1, a[0], b[1], a[1]) if len(a) == len(b) == 2 else None


def _grouped_sizes(a: tuple[int, ...], b: tuple[int, ...], result: tuple[int, ...]) -> Sizes:
    """Products of groups as if all were of one size: the rows, columns or depth that have no groups are divided."""
    groups = next((shape[0] for shape in (a, b, result) if len(shape) == 3), 1)
    rows, columns, depth = a[-2], b[-1], a[-1]
    if len(a) == len(b) == 2:
        depth = max(1, depth // groups)
    elif len(a) == 2:
        rows = max(1, rows // groups)
    elif len(b) == 2:
        columns = max(1, columns // groups)
    return groups, rows, columns, depth


def convolution_products(operation: Operation) -> list[list[tuple[Sizes, float]]] | None:
    """The ways in which each part of a convolution can be done; None where its shapes do not tell.

    A part is the result, the input's gradient or the weight's. A way is the sizes of its product and how many elements
    cross memory besides: implicit products gather the input as they go; Winograd's transforms write and read it.
    Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016): F(m x m, 3 x 3) does
    (m + 2)^2 products per tile of m x m results, which an implicit product needs 9 m^2 for.
    """
    is_backward = operation.name.endswith("_backward")
    tensors = [tensor.shape for tensor in operation.inputs if len(tensor.shape) >= 3]
    if len(tensors) < (3 if is_backward else 2):
        return None
    image, weight = tensors[1:3] if is_backward else tensors[:2]
    result = tensors[0] if is_backward else operation.outputs[0].shape
    if operation.attribute("transposed") is True:
        image, result = result, image
    groups_attribute = operation.attribute("groups", 1)
    groups = groups_attribute if isinstance(groups_attribute, int) else 1
    mask = operation.attribute("output_mask") if is_backward else None
    wanted = mask if isinstance(mask, list) and len(mask) >= 2 else [True, True]
    sizes = _Convolution(image, weight, result, groups)
    if not is_backward:
        return [sizes.forward()]
    return [ways for ways, is_wanted in zip((sizes.of_input(), sizes.of_weight()), wanted, strict=False) if is_wanted]


class _Convolution:
    """Shapes of one convolution: image (N, C, ...), weight (K, C / groups, ...), result (N, K, ...)."""

    def __init__(self, image: tuple[int, ...], weight: tuple[int, ...], result: tuple[int, ...], groups: int) -> None:
        self.image, self.weight, self.result, self.groups = image, weight, result, groups
        self.window = math.prod(weight[2:])
        self.channels, self.kernels = image[1] // groups, result[1] // groups
        self.pixels, self.results = image[0] * math.prod(image[2:]), result[0] * math.prod(result[2:])

    def forward(self) -> list[tuple[Sizes, float]]:
        """The result."""
        implicit = (self.groups, self.results, self.kernels, self.channels * self.window)
        return [(implicit, 0.0), *self._winograd(self.result, self.kernels, self.channels)]

    def of_input(self) -> list[tuple[Sizes, float]]:
        """The image's gradient: as many FLOPs as the result."""
        depth = max(1, self.kernels * self.window * self.results // max(1, self.pixels))
        implicit = (self.groups, self.pixels, self.channels, depth)
        return [(implicit, 0.0), *self._winograd(self.image, self.channels, self.kernels)]

    def of_weight(self) -> list[tuple[Sizes, float]]:
        """The weight's gradient: the sum over all pixels is the depth."""
        return [((self.groups, self.kernels, self.channels * self.window, self.results), 0.0)]

    def _winograd(self, out: tuple[int, ...], columns: int, depth: int) -> list[tuple[Sizes, float]]:
        """Only 3 x 3 windows at stride 1."""
        if self.weight[2:] != (3, 3) or self.groups != 1 or self.pixels > 1.5 * self.results:
            return []
        ways = []
        for tile in (2, 4):
            products = (tile + 2) ** 2
            tiles = out[0] * math.prod(-(-size // tile) for size in out[2:])
            # The transformed image and kernels, and the products: written, and found in the cache for the most part.
            extra = 1.0 * products * (tiles * depth + tiles * columns + columns * depth)
            ways.append(((products, tiles, columns, depth), extra))
        return ways


def is_depthwise(operation: Operation) -> bool:
    """Whether each channel is convolved alone: then memory bounds it."""
    groups = operation.attribute("groups", 1)
    weights = [tensor.shape for tensor in operation.inputs if len(tensor.shape) >= 3]
    return isinstance(groups, int) and groups > 1 and any(shape[1] == 1 for shape in weights[1:])


def attention_sizes(operation: Operation) -> tuple[int, int, int, int] | None:
    """Heads of all samples, queries, keys and width of a fused attention; None where its shapes do not tell."""
    places = [tensor.shape for tensor in operation.inputs if len(tensor.shape) == 4]
    first = 1 if operation.name.endswith("_backward") else 0
    if len(places) < first + 2:
        return None
    query, key = places[first], places[first + 1]
    return query[0] * query[1], query[2], key[2], query[3]
