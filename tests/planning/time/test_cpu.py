from __future__ import annotations

import statistics

import pytest

from stoker.planning.model.cpu_times import CpuTimes, place_of
from stoker.planning.model.update_time import operation_times
from stoker.records import Operation
from tests.planning.time.cpu_points import elementwise, hardware, law, product, tensor, unmeasured

NEW = [product(*shape) for shape in ((300, 200, 700), (64, 900, 250), (700, 700, 90), (96, 96, 96), (1000, 30, 500))]


def test_times_between_measured_points_follow_the_machine() -> None:
    """Shapes and sizes that were never timed come out right, in both dtypes."""
    times = CpuTimes.of(hardware())
    others = [*NEW, product(300, 200, 700, "bf16"), elementwise("relu", 3000), elementwise("add", 700_000)]
    errors = [abs(times.seconds(one) / law(one) - 1) for one in others]
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.15


def test_a_slower_machine_is_slower_by_as_much() -> None:
    """Nothing but the micro-benchmark decides: on a CPU of a third of the speed, three times the time."""
    fast, slow = CpuTimes.of(hardware()), CpuTimes.of(hardware(lambda one: 3 * law(one)))
    for one in NEW:
        assert slow.seconds(one) == pytest.approx(3 * fast.seconds(one), rel=1e-6)


def test_emulated_bf16_is_seen() -> None:
    """Where products in bf16 are slower than in fp32, forecasts of new ones are too."""

    def emulated(one: Operation) -> float:
        return law(one) * (20 if one.inputs[0].dtype == "bf16" else 1)

    times = CpuTimes.of(hardware(emulated))
    narrow, wide = times.seconds(product(300, 200, 700, "bf16")), times.seconds(product(300, 200, 700))
    assert narrow / wide == pytest.approx(10, rel=0.2)


def test_an_unknown_operation_costs_what_its_bytes_do_elsewhere() -> None:
    """It borrows from other functions of each element, and claims less."""

    def uneven(one: Operation) -> float:
        return law(one) * (1.5 if one.name == "add" else 1.0)

    times = CpuTimes.of(hardware(uneven))
    new, known = elementwise("never_heard_of", 100_000), elementwise("relu", 100_000)
    assert law(known) * 0.9 < times.seconds(new) < 1.6 * law(known)
    assert times.relative_error(new) > 1.2 * times.relative_error(known)


def test_a_family_that_was_not_timed_is_guessed_from_its_work() -> None:
    """Attention on a machine where only products and bytes are known: its FLOPs at the best rate, far from certain."""
    q = tensor(2, 4, 128, 64)
    attention = Operation(
        name="_scaled_dot_product_flash_attention_for_cpu",
        inputs=(q, q, q),
        outputs=(q,),
        flops=0,
        bytes_read=3 * q.numel * 4,
        bytes_written=q.numel * 4,
        attributes=(("is_causal", False),),
    )
    times = CpuTimes.of(hardware())
    assert times.seconds(attention) > 4 * 8 * 128 * 128 * 64 / 1.1e11
    assert times.relative_error(attention) > 0.5


def test_without_measurements_the_datasheet_or_usual_figures_serve() -> None:
    """A CPU of the catalogue has times, with wide errors; twice the rate on the sheet is nearly half the time."""
    one = product(2000, 2000, 2000)
    slow = operation_times(unmeasured(dense_flops={"fp32": 1e12}, bandwidth_bytes_per_s=1e11))
    fast = operation_times(unmeasured(dense_flops={"fp32": 2e12}, bandwidth_bytes_per_s=1e11))
    assert slow.seconds(one) / fast.seconds(one) == pytest.approx(2, rel=0.1)
    assert operation_times(unmeasured()).seconds(one) > 0
    assert slow.relative_error(one) > 0.5


def test_heads_and_images_change_the_work_but_not_the_place() -> None:
    """Each is computed alone: a rate that was measured of few of them holds of many."""
    few, many = (place_of(attention(heads=heads)) for heads in (2, 64))
    assert few.point == many.point
    assert many.flops == 32 * few.flops
    few, many = (place_of(convolution(images=images)) for images in (2, 64))
    assert few.point == many.point


def test_a_sum_of_two_dtypes_is_another_place_than_a_sum_of_one() -> None:
    """Converting on the way takes several times as long, in whichever order the two stand."""
    wide, narrow = tensor(1000, dtype="fp32"), tensor(1000, dtype="bf16")
    pairs = ((wide, wide), (wide, narrow), (narrow, wide))
    points = [
        place_of(Operation(name="add", inputs=pair, outputs=(wide,), flops=0, bytes_read=8, bytes_written=4)).point
        for pair in pairs
    ]
    assert points[1] == points[2] != points[0]


def attention(heads: int) -> Operation:
    """Causal, of 128 tokens, 64 wide."""
    one = tensor(1, heads, 128, 64, dtype="bf16")
    return Operation(
        name="_scaled_dot_product_flash_attention_for_cpu",
        inputs=(one, one, one),
        outputs=(one,),
        flops=0,
        bytes_read=3,
        bytes_written=1,
        attributes=(("is_causal", True),),
    )


def convolution(images: int) -> Operation:
    """3 × 3, 16 to 32 channels, 8 × 8 pixels."""
    return Operation(
        name="convolution",
        inputs=(tensor(images, 16, 8, 8), tensor(32, 16, 3, 3)),
        outputs=(tensor(images, 32, 8, 8),),
        flops=images * 589_824,
        bytes_read=1,
        bytes_written=1,
        attributes=(("groups", 1), ("stride", [1, 1])),
    )
