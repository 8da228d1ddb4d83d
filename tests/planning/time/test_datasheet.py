from dataclasses import replace

import pytest

from stoker.planning.model.gpu_roofline import PowerModel, Sustained
from tests.planning.time.gpu_devices import gpu


def sustained(**changes) -> Sustained:
    """What a device's datasheet promises."""
    hardware = gpu(**changes)
    return Sustained(hardware=hardware, power=PowerModel.of(hardware))


def test_fp32_never_takes_the_rate_of_tensor_cores() -> None:
    """Plain fp32 stays below 19.5 TFLOP/s, though tf32 would do eight times that."""
    device = sustained()
    assert device.flops("fp32") < 19.5e12 < device.flops("tf32")


def test_a_dtype_the_device_lacks_runs_at_the_rate_of_fp32() -> None:
    """bf16 on a device without it is emulated."""
    device = sustained(dense_flops={"fp32": 15e12}, compute_capability="7.0")
    assert device.flops("bf16") == device.flops("fp32")


def test_chips_without_integer_units_of_their_own_reach_less_of_their_peak() -> None:
    """Of equal peaks, a chip of capability 9.0 sustains less fp32 than one of 8.0."""
    free = {"power_w": None}
    assert sustained(compute_capability="9.0", **free).flops("fp32") < sustained(**free).flops("fp32")


def test_tiles_on_tensor_cores_take_longer_to_fill_and_drain() -> None:
    """A tile's fixed cost is more of the depth where the arithmetic is faster; fp32 keeps what was fitted."""
    device = sustained()
    assert device.tiles("bf16", is_batched=False).prologue > device.tiles("fp32", is_batched=False).prologue
    assert device.tiles("fp32", is_batched=True) is device.batched


def test_consumer_boards_lose_no_bandwidth_to_error_correction() -> None:
    """Of equal bandwidths on paper, an RTX board sustains more than an L4, and less than the paper."""
    hardware = gpu(compute_capability="8.9")
    rtx = replace(hardware, device=replace(hardware.device, name="rtx-4090", model="NVIDIA GeForce RTX 4090"))
    small, large = (Sustained(hardware=one, power=PowerModel.of(one)).bandwidth for one in (hardware, rtx))
    assert small < large < hardware.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("capability", "watts", "peak", "best"),
    [("8.0", 400.0, 312, 271), ("8.0", 300.0, 312, 253), ("10.0", 1000.0, 2250, 1745)],
)
def test_tensor_cores_sustain_less_in_steps_than_the_best_single_products(capability, watts, peak, best) -> None:
    """A100 as module and as card, and B200: 0.6 to 0.9 of the best shapes, alone and for moments [TFLOP/s]."""
    device = sustained(compute_capability=capability, power_w=watts, dense_flops={"fp32": 20e12, "bf16": peak * 1e12})
    assert 0.6 * best < device.flops("bf16") / 1e12 < 0.9 * best


def test_one_h100_sustains_in_steps_what_several_do_not() -> None:
    """As measured alone, 0.95 of the best single products; in published steps of several, 0.7 of them."""
    hardware = gpu(compute_capability="9.0", power_w=700.0, dense_flops={"fp32": 67e12, "bf16": 989e12})
    alone, among_several = (
        Sustained(hardware=hardware, power=PowerModel.of(hardware, is_alone=is_alone)).flops("bf16") / 1e12
        for is_alone in (True, False)
    )
    assert 0.9 * 795 < alone < 795
    assert 0.6 * 795 < among_several < 0.8 * 795


def test_memory_is_no_faster_than_kernels_ask_for_it() -> None:
    """Of two Hopper chips alike but for the memory, the faster one gains less than its datasheet says."""
    slow, fast = (
        sustained(compute_capability="9.0", multiprocessors=132, bandwidth_bytes_per_s=each).bandwidth
        for each in (3.35e12, 4.8e12)
    )
    assert slow == pytest.approx(0.89 * 3.35e12)
    assert slow < fast < 0.8 * 4.8e12


def test_attention_draws_less_and_keeps_its_clock() -> None:
    """At less than half of the products' rate an H100 is far below its limit: the clock is the full one."""
    device = sustained(compute_capability="9.0", power_w=700.0, dense_flops={"fp32": 67e12, "bf16": 989e12})
    assert device.flops("bf16", 0.45) == pytest.approx(0.45 * 0.80 * 989e12)
    assert device.flops("bf16") < 0.99 * 0.80 * 989e12
