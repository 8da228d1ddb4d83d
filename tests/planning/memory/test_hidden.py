"""What operations hide: the laws against what PyTorch's profiler saw, and what they leave alone."""

from __future__ import annotations

import pytest

from stoker.planning.model.workspaces import context_bytes, cublas_workspace_bytes, hidden_blocks, hidden_bytes
from tests.planning.memory.traces import operation, shaped

MEASURED = [
    # x, weight, y, dtype, channels-last, stride; measured forward and backward [bytes], PyTorch 2.13, one thread
    ((8, 3, 32, 32), (64, 3, 3, 3), (8, 64, 32, 32), "fp32", False, 1, 2_097_152, 2_553_088),
    ((8, 64, 32, 32), (128, 64, 3, 3), (8, 128, 32, 32), "fp32", False, 1, 4_194_304, 6_291_456),
    ((8, 128, 16, 16), (256, 128, 3, 3), (8, 256, 8, 8), "fp32", False, 2, 2_228_224, 1_572_864),
    ((8, 64, 16, 16), (64, 64, 1, 1), (8, 64, 16, 16), "fp32", False, 1, 0, 0),
    ((8, 64, 32, 32), (128, 64, 3, 3), (8, 128, 32, 32), "fp32", True, 1, 303_128, 589_824),
    ((8, 128, 16, 16), (256, 128, 3, 3), (8, 256, 8, 8), "fp32", True, 2, 1_187_864, 2_359_296),
    ((8, 64, 32, 32), (128, 64, 3, 3), (8, 128, 32, 32), "bf16", False, 1, 2_097_152, 3_850_628),
    ((8, 128, 16, 16), (256, 128, 3, 3), (8, 256, 8, 8), "bf16", False, 2, 1_114_112, 2_089_348),
    ((8, 64, 32, 32), (128, 64, 3, 3), (8, 128, 32, 32), "bf16", True, 1, 155_672, 704_900),
    ((8, 128, 16, 16), (256, 128, 3, 3), (8, 256, 8, 8), "bf16", True, 2, 598_040, 1_302_916),
]


@pytest.mark.parametrize(("x", "weight", "y", "dtype", "channels_last", "stride", "forward", "backward"), MEASURED)
def test_convolutions_on_a_cpu_hide_what_was_measured(x, weight, y, dtype, channels_last, stride, forward, backward):
    """What the profiler saw beyond the outputs: forward to 20 kB, backward to 5 kB, in bf16 to 0.42 MB."""
    inputs = [shaped(*x, dtype=dtype), shaped(*weight, dtype=dtype)]
    result = shaped(*y, dtype=dtype)
    attributes = {"channels_last": channels_last, "stride": [stride, stride]}
    one = operation("convolution", inputs, [result], **attributes)
    assert hidden_bytes(one, target="cpu") == pytest.approx(forward, abs=20_000)
    other = operation("convolution_backward", [result, *inputs], inputs, output_mask=[True, True, False], **attributes)
    assert hidden_bytes(other, target="cpu") == pytest.approx(backward, abs=5_000 if dtype == "fp32" else 420_000)


def test_the_first_convolution_needs_no_gradient_of_its_input() -> None:
    """Then only the output's gradient is copied into blocks, an image being read as it is."""
    shapes = [shaped(8, 64, 32, 32), shaped(8, 3, 32, 32), shaped(64, 3, 3, 3)]
    first = operation("convolution_backward", shapes, shapes[2:], output_mask=[False, True, False], stride=[1, 1])
    assert hidden_bytes(first, target="cpu") == 8 * 64 * 32 * 32 * 4


@pytest.mark.parametrize(
    ("dtype", "channels_last", "groups", "blocks"),
    [
        ("bf16", False, 1, (1000 + 500 + 360, 1000 + 500 + 360 + 720)),
        ("fp32", False, 1, (2000 + 1000 + 720, 2000 + 1000 + 720 + 720)),
        ("bf16", True, 1, (720,)),
        ("fp32", False, 5, (720,)),
    ],
)
def test_gradients_of_a_convolution_on_cuda_are_computed_on_copies(dtype, channels_last, groups, blocks) -> None:
    """First the input's, then the weight's with its sums in fp32; in channels-last sums alone, forward nothing."""
    grad, x = shaped(2, 10, 5, 5, dtype=dtype), shaped(2, 5, 5, 5, dtype=dtype)
    weight = shaped(4, 5, 3, 3, dtype=dtype)
    attributes = {"channels_last": channels_last, "groups": groups}
    one = operation("convolution_backward", [grad, x, weight], [x, weight], output_mask=[True, True], **attributes)
    assert hidden_blocks(one, target="cuda") == blocks
    first = operation("convolution_backward", [grad, x, weight], [weight], output_mask=[False, True], **attributes)
    assert hidden_blocks(first, target="cuda") == blocks[-1:]
    assert hidden_blocks(operation("convolution", [x, weight], [grad], **attributes), target="cuda") == ()


def test_an_lstm_copies_its_gates() -> None:
    """About four times its output, as measured for 64 tokens, 32 samples, width 128."""
    layer = operation("mkldnn_rnn_layer", [shaped(64, 32, 128)], [shaped(64, 32, 128)])
    assert hidden_bytes(layer, target="cpu") == pytest.approx(4_362_808, rel=0.02)
    back = operation("mkldnn_rnn_layer_backward", [shaped(64, 32, 128)], [shaped(64, 32, 128)])
    assert hidden_bytes(back, target="cpu") == pytest.approx(4_362_808, rel=0.02)


def test_other_operations_hide_nothing() -> None:
    """On either device."""
    for target in ("cpu", "cuda"):
        assert hidden_bytes(operation("relu", [shaped(4, 4)], [shaped(4, 4)]), target=target) == 0


def test_flash_attention_sums_the_queries_gradient_in_fp32() -> None:
    """Rows rounded up to 128, head dimension to 32, four bytes each, and one number more for each row."""
    heads = [shaped(2, 8, 100, 40, dtype="bf16")] * 4
    one = operation("_scaled_dot_product_flash_attention_backward", heads, heads[:3])
    assert hidden_bytes(one, target="cuda") == 2 * 8 * 128 * (64 + 1) * 4


def test_an_embedding_sorts_only_many_indices() -> None:
    """Up to 3072 indices need nothing; of more, runs of equal ones are summed separately."""
    width, rows = 64, 1000
    few, many = (
        operation("embedding_dense_backward", [shaped(n, width), shaped(n, dtype="int64")], [shaped(rows, width)])
        for n in (3072, 4000)
    )
    assert hidden_bytes(few, target="cuda") == 0
    assert hidden_bytes(many, target="cuda") == 4 * 4000 * 8 + (400 + rows) * width * 4


def test_sums_over_rows_are_split_over_blocks() -> None:
    """Measured on an H100: 132 MiB for 8192 x 8192, in fp32 and bf16. Few rows, many columns, other sums: nothing."""
    for dtype in ("fp32", "bf16"):
        one = operation("sum", [shaped(8192, 8192, dtype=dtype)], [shaped(1, 8192, dtype=dtype)], dim=[0])
        assert hidden_bytes(one, target="cuda", capability="9.0") == 132 * 2**20
        same = operation("sum", [shaped(64, 128, 8192, dtype=dtype)], [shaped(8192, dtype=dtype)], dim=[0, 1])
        assert hidden_bytes(same, target="cuda", capability="9.0") == 132 * 2**20
    for shape, dims in (((32, 8192), [0]), ((8192, 8192), [1]), ((8192, 8192), None), ((4096, 2**20), [0])):
        other = operation("sum", [shaped(*shape)], [shaped(1)], dim=dims)
        assert hidden_bytes(other, target="cuda", capability="9.0") == 0


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("8.9", 8_519_680), ("7.0", 8_519_680), ("9.0", 2**25), ("10.0", 2**25), ("12.0", 2**25)],
)
def test_cublas_takes_more_from_hopper_on(capability: str, expected: int) -> None:
    """`:4096:2:16:8` before, 32 MiB since."""
    assert cublas_workspace_bytes(capability) == expected


def test_the_context_is_told_with_its_doubt() -> None:
    """Between 300 and 600 MB."""
    assert context_bytes().low < context_bytes().value < context_bytes().high


def test_batch_norm_makes_its_inputs_gradient_twice_on_a_cpu() -> None:
    """Measured: 401,408 bytes for 8 × 64 × 14 × 14 in fp32, half of that in bf16."""
    for dtype, expected in (("fp32", 401_408), ("bf16", 200_704)):
        x, weight = shaped(8, 64, 14, 14, dtype=dtype), shaped(64)
        one = operation("native_batch_norm_backward", [x, x, weight], [x, weight, weight])
        assert hidden_bytes(one, target="cpu") == expected
        assert hidden_bytes(one, target="cuda") == 0
