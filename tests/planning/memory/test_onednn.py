"""Convolutions and products on a CPU: the laws of oneDNN's copies against what PyTorch's profiler saw."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from stoker.planning.model.workspaces import backward_bytes, forward_bytes, product_bytes
from stoker.records.trace import Operation
from tests.planning.memory.traces import operation, shaped


@dataclass(frozen=True)
class Measured:
    """A convolution and its hidden bytes, with PyTorch 2.13 on AVX-512 with AMX, one thread."""

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    fp32: tuple[int, int] | None = None
    bf16: tuple[int, int] | None = None
    groups: int = 1
    channels_last: bool = False
    transposed: bool = False

    def operations(self, dtype: str) -> tuple[Operation, Operation]:
        """Its forward and its backward pass."""
        stride = [max(1, -(-self.x[2] // self.y[2]), self.y[2] // self.x[2])] * 2
        attributes = {
            "channels_last": self.channels_last,
            "groups": self.groups,
            "stride": stride,
            "transposed": self.transposed,
        }
        x, w, y = (shaped(*shape, dtype=dtype) for shape in (self.x, self.w, self.y))
        mask = [True, True, False]
        backward = operation("convolution_backward", [y, x, w], [x, w], output_mask=mask, **attributes)
        return operation("convolution", [x, w], [y], **attributes), backward


MEASURED = [
    Measured("3×3", (16, 128, 12, 12), (128, 128, 3, 3), (16, 128, 12, 12), (1769472, 2359296), (884736, 1857924)),
    Measured(
        "3×3, stride", (16, 128, 12, 12), (256, 128, 3, 3), (16, 256, 6, 6), (2359296, 1769472), (1179648, 2140548)
    ),
    Measured("1×1", (12, 64, 24, 24), (256, 64, 1, 1), (12, 256, 24, 24), (0, 0), (3538944, 4489344)),
    Measured(
        "1×1, stride", (16, 128, 12, 12), (256, 128, 1, 1), (16, 256, 6, 6), (1329280, 2228224), (701696, 1114112)
    ),
    Measured("1×1, last", (8, 160, 24, 24), (40, 160, 1, 1), (8, 40, 24, 24), (0, 0), channels_last=True),
    Measured(
        "depthwise 3×3",
        (4, 144, 24, 24),
        (144, 1, 3, 3),
        (4, 144, 24, 24),
        (1332288, 2654208),
        (666144, 1332416),
        groups=144,
    ),
    Measured(
        "depthwise 3×3, stride",
        (4, 144, 24, 24),
        (144, 1, 3, 3),
        (4, 144, 12, 12),
        (1332288, 1658880),
        (666144, 1324512),
        groups=144,
    ),
    Measured(
        "depthwise 3×3, last",
        (16, 128, 7, 7),
        (128, 1, 3, 3),
        (16, 128, 7, 7),
        (4608, 9728),
        (2304, 6016),
        groups=128,
        channels_last=True,
    ),
    Measured(
        "depthwise 5×5", (8, 960, 3, 3), (960, 1, 5, 5), (8, 960, 3, 3), (372480, 385156), (186240, 384834), groups=960
    ),
    Measured(
        "depthwise 7×7, last",
        (8, 80, 12, 12),
        (80, 1, 7, 7),
        (8, 80, 12, 12),
        (15680, 4030080),
        groups=80,
        channels_last=True,
    ),
    Measured(
        "groups of 8",
        (12, 256, 12, 12),
        (256, 8, 3, 3),
        (12, 256, 12, 12),
        (1843200, 3538944),
        (921600, 884736),
        groups=32,
    ),
    Measured(
        "groups of 16, stride",
        (12, 512, 12, 12),
        (512, 16, 3, 3),
        (12, 512, 6, 6),
        (3833856, 4423680),
        (1916928, 2748804),
        groups=32,
    ),
    Measured(
        "transposed 2×2",
        (4, 32, 32, 32),
        (32, 16, 2, 2),
        (4, 16, 64, 64),
        (2097152, 1572864),
        (1048576, 1008132),
        transposed=True,
    ),
]


@pytest.mark.parametrize(
    ("measured", "dtype"),
    [(one, dtype) for one in MEASURED for dtype in ("fp32", "bf16") if getattr(one, dtype) is not None],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_laws_give_what_was_measured(measured: Measured, dtype: str) -> None:
    """Forward to 1 kB; backward to 10 kB in fp32, and to 0.25 MB in bf16, whose scratch memory is left out."""
    forward, backward = measured.operations(dtype)
    expected = getattr(measured, dtype)
    assert forward_bytes(forward) == pytest.approx(expected[0], abs=1_000)
    assert backward_bytes(backward) == pytest.approx(expected[1], abs=10_000 if dtype == "fp32" else 250_000)


def test_a_kernel_as_large_as_its_input_returns_its_weight_twice() -> None:
    """The first layer of a VGG's head, measured: two copies of the weight's gradient besides the one returned."""
    one = Measured("7×7 to a pixel", (24, 512, 7, 7), (208, 512, 7, 7), (24, 208, 1, 1))
    _, backward = one.operations("fp32")
    assert backward_bytes(backward) == 41_746_432


def test_images_are_read_as_they_are() -> None:
    """An input of three channels is not copied; where it needs no gradient, only the output's gradient is."""
    x, w, y = shaped(16, 3, 96, 96), shaped(64, 3, 7, 7), shaped(16, 64, 48, 48)
    result = 16 * 64 * 48 * 48 * 4
    assert forward_bytes(operation("convolution", [x, w], [y], stride=[2, 2])) == result
    first = operation("convolution_backward", [y, x, w], [w], output_mask=[False, True, False], stride=[2, 2])
    assert backward_bytes(first) == result


PRODUCTS = [  # rows, depth, columns of a product whose first operand lies transposed; hidden bytes measured
    (256, 896, 1024, 1_393_792),
    (512, 588, 2048, 1_393_792),
    (256, 640, 768, 1_131_648),
    (192, 800, 768, 865_408),
    (1024, 896, 256, 607_360),
    (2000, 640, 256, 594_688),
    (192, 800, 192, 423_040),
    (288, 2352, 96, 297_088),
    (256, 6144, 49, 395_392),
    (128, 1024, 256, 337_024),
]


@pytest.mark.parametrize(("rows", "depth", "columns", "measured"), PRODUCTS)
def test_transposed_products_in_bf16_hide_what_was_measured(rows: int, depth: int, columns: int, measured: int) -> None:
    """The gradients of linear layers' weights, to the byte; in fp32, or where nothing is transposed, nothing."""
    for dtype, transposed, expected in (("bf16", True, measured), ("bf16", False, 0), ("fp32", True, 0)):
        operands = [shaped(rows, depth, dtype=dtype), shaped(depth, columns, dtype=dtype)]
        result = [shaped(rows, columns, dtype=dtype)]
        assert product_bytes(operation("mm", operands, result, transpose_a=transposed)) == expected
