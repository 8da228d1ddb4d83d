import pytest

from stoker.errors import NoDevice
from stoker.planning.model.gpu_roofline import kind_of, roof_seconds
from stoker.planning.model.gpu_times import GpuTimes
from stoker.planning.model.update_time import operation_times
from tests.planning.time.gpu_devices import (
    addition,
    attention,
    batched,
    convolution,
    gpu,
    layer_norm,
    measured,
    operation,
    product,
    softmax,
    timing,
)

EVERY_KIND = (
    product(4096, 4096, 4096),
    product(4096, 4096, 4096, "bf16"),
    batched(96, 512, 512, 64),
    convolution(),
    convolution("convolution_backward"),
    attention(1024),
    layer_norm(8192, 1024),
    softmax(8192, 512),
    addition(10**7),
)


@pytest.mark.parametrize("made", EVERY_KIND, ids=lambda made: f"{made.name} {made.inputs[0].dtype}")
def test_no_operation_is_faster_than_the_datasheet_allows(made) -> None:
    """Time is at least what FLOPs and bytes take at the peaks (Winograd's FLOPs are a quarter); the error is known."""
    hardware = gpu()
    peak = hardware.dense_flops[made.inputs[0].dtype] * (4 if "convolution" in made.name else 1)
    least = max(made.flops / peak, (made.bytes_read + made.bytes_written) / hardware.bandwidth_bytes_per_s)
    times = operation_times(hardware)
    assert times.seconds(made) > least
    assert 0.02 < times.relative_error(made) < 0.5


def test_a_better_device_is_faster_at_everything() -> None:
    """Twice the rates, bandwidth and multiprocessors: nothing takes longer."""
    worse = gpu()
    better = gpu(
        dense_flops={name: 2 * rate for name, rate in worse.dense_flops.items()},
        bandwidth_bytes_per_s=2 * worse.bandwidth_bytes_per_s,
        multiprocessors=216,
        l2_bytes=80 * 2**20,
        power_w=1000.0,
    )
    slow, fast = operation_times(worse), operation_times(better)
    assert all(fast.seconds(one) <= slow.seconds(one) for one in EVERY_KIND)


def test_measured_points_are_met_and_make_the_error_smaller() -> None:
    """A device a third slower than its datasheet says is recognised by forty points of it, within 5 %."""
    shapes = [(128 * i, 256 * j, 512 * k) for i in (1, 3, 9, 27) for j in (1, 2, 4, 8, 16) for k in (1, 4)]
    plain = operation_times(gpu())
    timings = [timing(product(*one), 1.5 * plain.seconds(product(*one)) + 3e-5) for one in shapes]
    times = operation_times(measured(gpu(), timings))
    unseen = product(2000, 1500, 1000)
    assert times.seconds(unseen) == pytest.approx(1.5 * plain.seconds(unseen), rel=0.05)
    assert times.relative_error(unseen) < plain.relative_error(unseen)


def test_a_throttled_board_is_less_certain() -> None:
    """What its power limit leaves depends on cooling: the error of an L4 is larger than of an A100."""
    small = gpu(compute_capability="8.9", power_w=72.0, dense_flops={"fp32": 30.3e12}, multiprocessors=60)
    made = product(4096, 4096, 4096)
    assert operation_times(small).relative_error(made) > 1.5 * operation_times(gpu()).relative_error(made)


def test_asking_again_gives_the_same_and_attributes_may_be_lists() -> None:
    """A convolution's lists of strides are no obstacle to remembering it."""
    times = operation_times(gpu())
    made = convolution(stride=[1, 1], padding=[1, 1])
    assert times.seconds(made) == times.seconds(convolution(stride=[1, 1], padding=[1, 1])) > 0


def test_an_operation_without_work_takes_no_time() -> None:
    """Not even the gap between kernels."""
    assert operation_times(gpu()).seconds(operation("empty", (), ())) == 0.0


def test_what_a_datasheet_lacks_is_named() -> None:
    """Without bandwidth and multiprocessors there is no forecast, and the message names both."""
    with pytest.raises(NoDevice, match="memory bandwidth and number of multiprocessors") as caught:
        GpuTimes.of(gpu(bandwidth_bytes_per_s=None, multiprocessors=None))
    assert "on a100 (A100)" in str(caught.value)


def test_the_whole_follows_from_its_parts() -> None:
    """From the datasheet alone, a time is the roof's and the gap between kernels."""
    times = GpuTimes.of(gpu())
    made = addition(10**8)
    roof = roof_seconds(made, *kind_of(made), times.sustained, times.calibration.scales("stream", ""))
    assert 0 < times.seconds(made) - roof < 5e-6


def test_operations_of_a_family_share_an_error_that_measurements_take_away() -> None:
    """All products on tensor cores stand or fall by one rate, attention by another; fp32's error is smaller."""
    times = GpuTimes.of(gpu())
    of_products, of_fp32, of_norms = (
        times.shared_error(one) for one in (product(512, 512, 512, "bf16"), product(512, 512, 512), layer_norm(64, 64))
    )
    assert of_products == times.shared_error(product(64, 64, 64, "bf16"))
    contiguous, last = (
        times.shared_error(convolution(dtype="bf16", channels_last=is_last)) for is_last in (False, True)
    )
    assert contiguous[0] == last[0]
    assert contiguous[1] > last[1]
    assert len({of_products[0], of_fp32[0], of_norms[0]}) == 3
    fused = times.shared_error(attention(1024))
    assert times.shared_error(attention(1024, kernel="efficient", dtype="fp32")) == fused
    assert of_fp32[1] < of_products[1]


def test_throttled_arithmetic_is_faster_in_a_step_than_alone() -> None:
    """On a board of 70 W, and outside of tensor cores only; an A100 of 400 W has nothing to recover."""

    def ratio(made, **changes) -> float:
        times = GpuTimes.of(gpu(**changes))
        return GpuTimes(times.sustained, times.calibration, in_step=False).seconds(made) / times.seconds(made)

    small = {"compute_capability": "7.5", "power_w": 70.0, "dense_flops": {"fp32": 8.1e12, "bf16": 65e12}}
    assert 1.05 < ratio(product(2048, 2048, 2048), **small) < 1.3
    assert ratio(product(2048, 2048, 2048, "bf16"), **small) == 1.0
    assert ratio(addition(10**7), **small) == 1.0
    assert ratio(product(2048, 2048, 2048)) == 1.0
