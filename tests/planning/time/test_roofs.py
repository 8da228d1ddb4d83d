from dataclasses import replace

import numpy as np
import pytest

from stoker.planning.model.gpu_kernels import STEP_S, indexed_seconds
from stoker.planning.model.gpu_roofline import PowerModel, Scales, Sustained, kind_of, point_of, roof_seconds
from tests.planning.time.gpu_devices import (
    addition,
    attention,
    batched,
    convolution,
    gpu,
    layer_norm,
    operation,
    product,
    recurrent,
    softmax,
    tensor,
)


def seconds(made, scales=Scales(), **changes) -> float:  # noqa: B008 - frozen
    """What an operation takes on a device with such figures."""
    hardware = gpu(**changes)
    kind, dtype = kind_of(made)
    return roof_seconds(made, kind, dtype, Sustained(hardware=hardware, power=PowerModel.of(hardware)), scales)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (product(64, 64, 64, "bf16"), ("product", "bf16")),
        (
            operation("_scaled_mm", (tensor(64, 64, dtype="fp8"), tensor(64, 64, dtype="fp8"), tensor(1)), ()),
            ("product", "fp8"),
        ),
        (batched(8, 64, 64, 64), ("batched product", "fp32")),
        (convolution(), ("convolution", "fp32")),
        (convolution("convolution_backward"), ("convolution", "fp32")),
        (attention(128), ("attention", "bf16")),
        (recurrent(), ("recurrent", "fp32")),
        (recurrent("_cudnn_rnn_backward", dtype="bf16"), ("recurrent", "bf16")),
        (operation("_cudnn_rnn", (tensor(3),), (tensor(3),)), ("stream", "")),
        (layer_norm(64, 64), ("row", "native_layer_norm")),
        (softmax(64, 64), ("row", "softmax")),
        (addition(64), ("stream", "")),
        (operation("mm", (), ()), ("stream", "")),
        (operation("something_new", (tensor(3),), (tensor(3),)), ("stream", "")),
    ],
)
def test_what_bounds_an_operation(made, kind) -> None:
    """Every operation has a kind; an unknown one is bound by its bytes."""
    assert kind_of(made) == kind


def test_three_by_three_convolutions_beat_the_rate_of_products() -> None:
    """By Winograd's algorithm an fp32 convolution takes less than its FLOPs at full rate; one of 5 x 5 cannot."""
    rate = 19.5e12
    assert seconds(convolution()) < convolution().flops / rate
    assert seconds(convolution(window=5)) > convolution(window=5).flops / rate


def test_the_backward_pass_of_a_convolution_takes_about_twice_the_forward_pass() -> None:
    """Two parts of as many FLOPs, one of which has no fast algorithm."""
    assert 1.7 < seconds(convolution("convolution_backward", window=5)) / seconds(convolution(window=5)) < 3.0


def test_a_causal_mask_saves_up_to_half_of_attention() -> None:
    """Of long sequences nearly half of the work is masked, of short ones nothing."""
    assert seconds(attention(8192, is_causal=True)) == pytest.approx(seconds(attention(8192)) / 2, rel=0.05)
    assert seconds(attention(128, is_causal=True)) == seconds(attention(128))


@pytest.mark.parametrize(("newer", "like"), [("10.3", "10.0"), ("12.0", "8.9")])
def test_fused_attention_reaches_as_much_as_on_the_chip_whose_kernels_it_runs(newer: str, like: str) -> None:
    """Of what products reach there, whose share is each chip's own; and as many rows of a norm are in flight."""
    ratios, norms = [], []
    for capability in (newer, like):
        changes = {"compute_capability": capability, "power_w": None}
        ratios.append(seconds(attention(8192), **changes) / seconds(product(8192, 8192, 8192, "bf16"), **changes))
        norms.append(seconds(layer_norm(65536, 4096), **changes))
    assert ratios[0] == pytest.approx(ratios[1], rel=0.02)
    assert norms[0] == norms[1]


def test_the_memory_efficient_kernel_is_slower_than_flash_attention() -> None:
    """Attention with a mask has no other kernel; the ratio is that of their published rates."""
    ratio = seconds(attention(4096, kernel="efficient")) / seconds(attention(4096))
    assert 1.7 < ratio < 2.5


def test_attention_in_fp32_is_sums_of_products_on_tensor_cores() -> None:
    """From capability 8.0 on: faster than an A100's fp32, slower than a GeForce's, which has no more of tf32."""
    in_fp32 = attention(4096, kernel="efficient", dtype="fp32")
    a100 = seconds(in_fp32)
    assert in_fp32.flops / (156e12 / 3) < a100 < in_fp32.flops / 19.5e12
    older = seconds(in_fp32, compute_capability="7.0", dense_flops={"fp32": 19.5e12, "fp16": 156e12})
    assert older > in_fp32.flops / 19.5e12
    geforce = {"compute_capability": "8.6", "dense_flops": {"fp32": 35.6e12, "tf32": 35.6e12, "bf16": 71e12}}
    assert seconds(in_fp32, **geforce) > 3 * in_fp32.flops / 35.6e12


def test_time_steps_follow_each_other() -> None:
    """A small layer takes as long as its steps wait for each other, not its FLOPs: twice as many, twice as long."""
    small = recurrent(steps=256, batch=4, width=32)
    assert seconds(small) > 2 * 256 * STEP_S
    assert seconds(small) > 50 * small.flops / 19.5e12
    assert seconds(recurrent(steps=512, batch=4, width=32)) == pytest.approx(2 * seconds(small), rel=0.05)


def test_a_large_recurrent_layer_is_bound_by_its_products() -> None:
    """Its FLOPs at some share of the rate; backward twice as many."""
    large = recurrent(steps=32, batch=1024, width=4096, layers=1)
    assert large.flops / 19.5e12 < seconds(large) < 1.5 * large.flops / 19.5e12
    backward = recurrent("_cudnn_rnn_backward", steps=32, batch=1024, width=4096, layers=1)
    assert seconds(backward) == pytest.approx(2 * seconds(large), rel=0.15)


def test_factors_scale_what_they_are_of() -> None:
    """Twice the bandwidth halves a stream; twice the arithmetic nearly halves a large product."""
    assert seconds(addition(10**7), Scales(bandwidth=2.0)) == pytest.approx(seconds(addition(10**7)) / 2)
    large = product(8192, 8192, 8192)
    assert seconds(large, Scales(flops=2.0)) == pytest.approx(seconds(large) / 2, rel=0.05)


def test_what_moves_nothing_takes_nothing() -> None:
    """An operation without tensors is no work for the device."""
    assert seconds(operation("empty", (), ())) == 0.0


def test_operations_lie_near_those_like_them() -> None:
    """A product of another layout is at a distance, one of twice the rows one doubling away."""
    near = point_of(product(64, 64, 64, transpose_b=True), "product")
    assert np.linalg.norm(point_of(product(128, 64, 64, transpose_b=True), "product") - near) == pytest.approx(1.0)
    assert np.linalg.norm(point_of(product(64, 64, 64, transpose_b=False), "product") - near) == pytest.approx(2.0)
    ways = [point_of(convolution(name), "convolution") for name in ("convolution", "convolution_backward")]
    assert not np.allclose(*ways)


def test_rows_that_are_not_whole_words_slow_tensor_cores_down() -> None:
    """A vocabulary of 50,257 as an operand costs thrice, as a result less; of 50,304 nothing; fp32 does not mind."""
    padded, odd = (product(4096, 768, vocab, "bf16") for vocab in (50_304, 50_257))
    assert seconds(odd) == pytest.approx(3.0 * seconds(padded), rel=0.01)
    # A weight lies in rows of 768: only the result's are odd.
    forward, forward_padded = (product(4096, vocab, 768, "bf16", transpose_b=True) for vocab in (50_257, 50_304))
    assert 1.2 < seconds(forward) / seconds(forward_padded) < 2
    assert seconds(product(4096, 768, 50_257)) == pytest.approx(seconds(product(4096, 768, 50_304)), rel=0.01)


def test_convolutions_on_tensor_cores_copy_what_is_not_in_channels_last() -> None:
    """Two images for each gradient, read and written, and in tf32 for the result; fp32 outside of them takes either."""

    def contiguous_less_last(name: str, dtype: str, **attributes: object) -> float:
        contiguous, last = (
            seconds(convolution(name, dtype=dtype, channels_last=is_last, **attributes)) for is_last in (False, True)
        )
        return contiguous - last

    result, image, _ = convolution("convolution_backward", dtype="bf16").inputs
    copied = 2 * 2 * (result.numel + image.numel) / (0.89 * gpu().bandwidth_bytes_per_s)
    assert contiguous_less_last("convolution_backward", "bf16") == pytest.approx(2 * copied)
    alone = contiguous_less_last("convolution_backward", "bf16", output_mask=[False, True, False])
    assert alone == pytest.approx(copied)
    assert contiguous_less_last("convolution", "bf16") == 0
    assert contiguous_less_last("convolution", "tf32") == pytest.approx(2 * copied)
    assert contiguous_less_last("convolution_backward", "fp32") == 0


def test_an_image_in_another_memory_format_than_its_weights_is_copied_first() -> None:
    """By a kernel that computes addresses from indices, on top of the convolution."""
    same, mixed = (
        convolution(dtype="bf16", channels_last=True, **changes) for changes in ({}, {"reordered_bytes": 10**8})
    )
    copied_s = indexed_seconds(10**8 / 2, gpu().dense_flops["fp32"], "8.0")
    assert copied_s > 2 * 10**8 / (0.89 * gpu().bandwidth_bytes_per_s)
    assert seconds(mixed) - seconds(same) == pytest.approx(copied_s)


def test_a_convolution_on_tensor_cores_reads_each_pixel_once() -> None:
    """Of few channels it takes what its tensors take, not what nine shifted copies of them do."""
    image, weight = tensor(256, 16, 128, 128, dtype="bf16"), tensor(16, 16, 3, 3, dtype="bf16")
    one = operation("convolution", (image, weight), (image,), 2 * image.numel * 16 * 9, channels_last=True)
    moved_s = (one.bytes_read + one.bytes_written) / (0.89 * gpu().bandwidth_bytes_per_s)
    assert moved_s <= seconds(one) < 5 * moved_s


def test_convolutions_in_fp32_on_hopper_have_no_winograd() -> None:
    """They take their FLOPs at three quarters of the rate of products, longer than on an equal chip that has it."""
    hopper, other = (seconds(convolution(), compute_capability=one) for one in ("9.0", "8.9"))
    assert hopper > 1.5 * other


def batch_norm(name: str, channels: int, dtype: str, *, channels_last: bool):
    """Of 64 images of 64 x 64."""
    x = tensor(64, channels, 64, 64, dtype=dtype)
    return operation(name, (x,) if name == "native_batch_norm" else (x, x), (x,), channels_last=channels_last)


@pytest.mark.parametrize("name", ["native_batch_norm", "native_batch_norm_backward"])
def test_a_batch_norm_in_bf16_is_not_cudnns(name: str) -> None:
    """Of contiguous tensors a block goes over a channel: more channels take no longer. fp16 and fp32 know no format."""
    few, many = (seconds(batch_norm(name, channels, "bf16", channels_last=False)) for channels in (16, 64))
    assert few == pytest.approx(many)
    formats = [seconds(batch_norm(name, 64, "bf16", channels_last=is_last)) for is_last in (False, True)]
    assert formats[0] > 1.5 * formats[1]
    assert formats[1] > 1.3 * seconds(batch_norm(name, 64, "fp16", channels_last=True))
    assert seconds(batch_norm(name, 64, "fp32", channels_last=True)) == pytest.approx(
        seconds(batch_norm(name, 64, "fp32", channels_last=False))
    )


def test_some_streams_reach_a_share_of_the_bandwidth() -> None:
    """Tensors put together take longer than others of as many bytes, most of all within rows."""
    x = tensor(2**13, 2**13)
    copied = seconds(operation("clone", (x,), (x,)))
    rows, columns, by_default, counted_back = (
        seconds(operation("cat", (x,), (x,), **given)) for given in ({"dim": 0}, {"dim": 1}, {}, {"dim": -2})
    )
    assert rows == by_default == counted_back == pytest.approx(copied / 0.62)
    assert columns == pytest.approx(copied / 0.37)


def test_running_sums_along_rows_are_slower_than_within_them() -> None:
    """Where neighbours of a sum are not neighbours in memory."""
    x = tensor(64, 1024, 1024)
    across, within = (seconds(operation("cumsum", (x,), (x,), dim=dim)) for dim in (1, -1))
    assert across > 10 * within


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_addresses_that_are_computed_from_indices_take_longer_than_memory(dtype) -> None:
    """A copy into another order takes the same time in both dtypes, by the number of its elements."""
    x = tensor(2**26, dtype=dtype)
    plain, indexed = (operation("clone", (x,), (x,), **changes) for changes in ({}, {"is_indexed": True}))
    assert seconds(plain) < seconds(indexed)
    expected = indexed_seconds(2**26, gpu().dense_flops["fp32"], "8.0")
    assert seconds(indexed) == pytest.approx(expected)


def test_rolling_is_three_copies() -> None:
    """Each of which computes addresses."""
    x = tensor(2**26)
    assert seconds(operation("roll", (x,), (x,))) == pytest.approx(
        3 * seconds(operation("clone", (x,), (x,), is_indexed=True))
    )


def test_filling_by_a_mask_copies_first() -> None:
    """It takes twice as long as a sum of as many bytes."""
    x = tensor(2**26)
    filled, doubled = (seconds(operation(name, (x,), (x,))) for name in ("masked_fill", "neg"))
    assert filled == pytest.approx(2 * doubled)


def test_a_sum_over_rows_waits_for_its_parts() -> None:
    """Some 22 µs beyond reading, less for few rows, and not where rows are summed within."""
    over, few, within = (
        operation("sum", (tensor(rows, 1024),), (tensor(*result),), dim=[dim])
        for rows, result, dim in ((16384, (1, 1024), 0), (1024, (1, 1024), 0), (16384, (16384, 1), 1))
    )
    assert seconds(over) - seconds(within) == pytest.approx(22e-6, rel=0.1)
    assert 0 < seconds(few) < 10e-6


def test_layer_norms_of_many_short_rows_are_bound_by_beginning_them() -> None:
    """Of equal bytes, rows of 96 take twice as long as rows of 3072."""
    short, long = layer_norm(2**17, 96), layer_norm(2**12, 3072)
    assert seconds(short, compute_capability="9.0") > 2 * seconds(long, compute_capability="9.0")


def test_layer_norms_on_an_a100_are_bound_by_memory() -> None:
    """Of rows that are short enough for the caches: published ones reach 0.86 of its 1.555 TB/s."""
    norm = layer_norm(2**15, 1024)
    reached = (norm.bytes_read + norm.bytes_written) / seconds(norm) / 1.555e12
    assert reached == pytest.approx(0.86, abs=0.04)


def weight_gradients(rows: int, columns: int, output_mask: list[bool]):
    """A layer norm's backward pass."""
    x = tensor(rows, columns)
    return operation("native_layer_norm_backward", (x, x, tensor(columns)), (x,), output_mask=output_mask)


def test_gradients_of_a_norms_weights_are_summed_row_by_row() -> None:
    """By few blocks, and by more where rows are many and short; without weights there is nothing to sum."""
    frozen, trained = ([True, False, False], [True, True, True])
    waited = {
        (rows, columns): seconds(weight_gradients(rows, columns, trained), multiprocessors=132)
        - seconds(weight_gradients(rows, columns, frozen), multiprocessors=132)
        for rows, columns in ((2**16, 768), (2**17, 768), (2**17, 4096))
    }
    assert waited[2**16, 768] == pytest.approx(2**16 * 3.3e-9)
    assert waited[2**17, 768] < waited[2**16, 768]
    assert waited[2**17, 4096] == pytest.approx(2**17 * 3.3e-9)


def test_a_bias_is_added_to_a_convolution_by_itself() -> None:
    """Its result is read and written once more."""
    image, weight = tensor(64, 64, 56, 56, dtype="bf16"), tensor(64, 64, 3, 3, dtype="bf16")
    flops = 2 * image.numel * 64 * 9
    without, having = (
        operation("convolution", (image, weight, *bias), (image,), flops, channels_last=True)
        for bias in ((), (tensor(64, dtype="bf16"),))
    )
    added_s = 2 * 2 * image.numel / (0.89 * gpu().bandwidth_bytes_per_s)
    assert seconds(having) - seconds(without) == pytest.approx(added_s, rel=0.01)


def test_convolutions_of_images_are_slow_on_hopper() -> None:
    """Three channels take longer than eight, which do eight thirds of the arithmetic."""

    def of(channels: int):
        image, weight = tensor(64, channels, 224, 224, dtype="bf16"), tensor(64, channels, 7, 7, dtype="bf16")
        out = tensor(64, 64, 112, 112, dtype="bf16")
        return operation("convolution", (image, weight), (out,), 2 * out.numel * channels * 49, channels_last=True)

    assert seconds(of(3), compute_capability="9.0") > 2 * seconds(of(8), compute_capability="9.0")
    assert seconds(of(3)) < seconds(of(8))


def test_gradients_of_pointwise_convolutions_in_fp32_are_slow_on_hopper() -> None:
    """Forward they take what their products take."""
    backward, forward = (convolution(name, window=1) for name in ("convolution_backward", "convolution"))
    ratios = [
        seconds(one, compute_capability="9.0") / seconds(one, compute_capability="8.9") for one in (backward, forward)
    ]
    assert ratios[0] > 1.5 * ratios[1]


def test_slow_convolutions_in_fp32_are_not_throttled_on_a_hopper_of_350_w() -> None:
    """Products at the full rate draw more than the limit; kernels that reach a third or three quarters of it do not."""
    board = {"compute_capability": "9.0", "dense_flops": {"fp32": 51.2e12}, "multiprocessors": 114}
    made = (convolution(window=1), convolution("convolution_backward", window=1), product(8192, 8192, 8192))
    ratios = [seconds(one, **board, power_w=350.0) / seconds(one, **board, power_w=700.0) for one in made]
    assert ratios[:2] == pytest.approx([1, 1])
    assert ratios[2] > 1.1


def test_attention_pads_to_tiles_and_pays_for_dropout() -> None:
    """197 tokens take as long as 256, and dropped weights are drawn."""
    odd, even = (seconds(attention(tokens), bandwidth_bytes_per_s=1e15) for tokens in (197, 256))
    assert odd == pytest.approx(even)
    dropping = replace(attention(4096), attributes=(*attention(4096).attributes, ("dropout_p", 0.1)))
    assert seconds(dropping) > 1.5 * seconds(attention(4096))


def grouped(channels: int, dtype: str = "bf16"):
    """A 3 x 3 convolution of 128 channels or so in groups of `channels`."""
    width = 128 // channels * channels
    image, weight = tensor(32, width, 28, 28, dtype=dtype), tensor(width, channels, 3, 3, dtype=dtype)
    flops = 2 * image.numel * 9 * channels
    return operation("convolution", (image, weight), (image,), flops, groups=width // channels, channels_last=True)


def test_groups_of_a_few_channels_are_bound_by_memory_and_odd_ones_have_no_kernels() -> None:
    """Of 4 and of 8 as long as the tensors take at half the bandwidth; of 24 as arithmetic outside of tensor cores."""
    few = [seconds(grouped(channels)) for channels in (4, 8)]
    assert few[0] == pytest.approx(few[1], rel=0.05)
    bytes_s = (grouped(8).bytes_read + grouped(8).bytes_written) / (0.89 * gpu().bandwidth_bytes_per_s)
    assert few[1] == pytest.approx(2 * bytes_s)
    assert seconds(grouped(24)) > 3 * few[1]


def test_groups_of_many_channels_are_products_of_their_own() -> None:
    """Of 48, which is no power of two, at least at half the rate of 64; not outside of tensor cores."""
    odd, even = (grouped(channels).flops / seconds(grouped(channels)) for channels in (48, 64))
    assert 0.5 * even < odd < even


def elementwise(name: str, dtype: str):
    """An elementwise operation with one input."""
    x = tensor(2**26, dtype=dtype)
    return operation(name, (x,), (x,))


def test_instructions_bound_kernels_of_half_precision_where_memory_is_fast() -> None:
    """An A100 takes as long for a GELU in bf16 as for one in fp32, of twice the bytes; a graphics chip half as long."""
    graphics = {
        "dense_flops": {"fp32": 35.6e12, "bf16": 71.2e12},
        "bandwidth_bytes_per_s": 0.936e12,
        "compute_capability": "8.6",
    }
    fast, slow = (
        seconds(elementwise("gelu", "bf16"), **one) / seconds(elementwise("gelu", "fp32"), **one)
        for one in ({"bandwidth_bytes_per_s": 2.039e12}, graphics)
    )
    assert slow == pytest.approx(0.5)
    assert fast > 1.5 * slow
    assert seconds(elementwise("relu", "bf16")) < seconds(elementwise("native_dropout", "bf16"))
    assert seconds(elementwise("relu", "fp32")) == seconds(elementwise("gelu", "fp32"))


def test_kernels_of_hopper_and_of_the_b200_load_16_bytes_of_half_precision_at_once() -> None:
    """So a GELU in bf16 takes fewer instructions there than on later graphics chips, and than where it is not known."""
    figures = {"bandwidth_bytes_per_s": 8e12}
    at_once, others = ("9.0", "10.0"), ("10.3", "12.0", "8.9", None)
    taken = {one: seconds(elementwise("gelu", "bf16"), compute_capability=one, **figures) for one in at_once + others}
    assert all(taken[one] == pytest.approx(0.6 * taken[other]) for one in at_once for other in others)


def heads(width: int):
    """Fused attention of as much arithmetic, by the width of its heads."""
    one = tensor(8, 512 // width, 2048, width, dtype="bf16")
    return operation(
        "_scaled_dot_product_flash_attention", (one, one, one), (one,), 4 * 8 * 2048**2 * 512, is_causal=False
    )


def test_heads_are_padded_to_the_width_of_a_kernel() -> None:
    """Heads of 40 components take as long as heads of 64, which do 1.6 times the work."""
    assert seconds(heads(128)) == pytest.approx(seconds(heads(64)))
    padded = operation("_scaled_dot_product_flash_attention", heads(64).inputs, heads(64).outputs, heads(64).flops)
    narrow = tensor(8, 8, 2048, 40, dtype="bf16")
    own = operation(padded.name, (narrow, narrow, narrow), (narrow,), padded.flops * 40 // 64)
    assert seconds(own) == pytest.approx(seconds(padded))


def test_convolutions_on_an_a100_are_slower_than_products() -> None:
    """At 0.8 of the rate of the product that one is made of; on a graphics chip at its rate."""
    image, weight = tensor(32, 512, 28, 28, dtype="bf16"), tensor(512, 512, 3, 3, dtype="bf16")
    made = operation("convolution", (image, weight), (image,), 2 * image.numel * 9 * 512, groups=1, channels_last=True)
    alone = product(32 * 28 * 28, 512, 9 * 512, "bf16")
    assert seconds(made) / seconds(alone) == pytest.approx(1.25, abs=0.04)
    graphics = {"compute_capability": "8.6", "bandwidth_bytes_per_s": 0.936e12}
    assert seconds(made, **graphics) / seconds(alone, **graphics) == pytest.approx(1.0, abs=0.04)
