import pytest

from stoker.planning.model.gpu_roofline import PowerModel, flops_by_dtype, has_stacked_memory
from tests.planning.time.gpu_devices import addition, attention, convolution, gpu, operation, product, tensor


def test_a_small_board_cannot_hold_its_clock_and_a_large_one_can() -> None:
    """An L4 of 72 W sustains less than 0.6 of its fp32 rate, an H100 of 700 W all of it."""
    small = PowerModel.of(gpu(compute_capability="8.9", power_w=72.0))
    large = PowerModel.of(gpu(compute_capability="9.0", power_w=700.0))
    assert small.sustained_share(23e12, "fp32") < 0.6
    assert large.sustained_share(52e12, "fp32") == 1.0


def test_the_same_chip_under_a_lower_limit_is_slower() -> None:
    """An A100 at 250 W sustains some 0.9 of what it does at 400 W, as measured."""
    shares = [PowerModel.of(gpu(power_w=watts)).sustained_share(18.2e12, "fp32") for watts in (250.0, 400.0)]
    assert shares[1] == 1.0
    assert shares[0] == pytest.approx(0.9, abs=0.03)


def test_without_a_known_limit_nothing_is_throttled() -> None:
    """Where the limit is unknown, the full clock is assumed."""
    assert PowerModel.of(gpu(power_w=None)).sustained_share(1e15, "fp32") == 1.0


def test_energy_grows_with_work_and_stops_at_the_limit() -> None:
    """Idle is the floor, work adds to it, and no work takes more than the limit allows in its time."""
    power = PowerModel.of(gpu())
    idle = power.energy_j(1.0, {}, 0.0)
    some = power.energy_j(1.0, {"fp32": 5e12}, 1e11)
    assert 0 < idle < some < 400.0
    assert power.energy_j(1.0, {"fp32": 1e15}, 0.0) == 400.0


def test_what_memory_a_chip_has_follows_from_its_capability() -> None:
    """HBM for data-centre chips, GDDR for the rest, RTX 50 among them."""
    stacked = [has_stacked_memory(gpu(compute_capability=one)) for one in ("7.0", "8.0", "9.0", "10.0", "10.3")]
    assert all(stacked)
    assert not any(has_stacked_memory(gpu(compute_capability=one)) for one in ("6.1", "7.5", "8.6", "8.9", "12.0"))


def test_flops_are_counted_by_the_dtype_of_products_as_often_as_they_run() -> None:
    """Two dtypes separately, counts multiplied (also by a fraction), and what has no FLOPs is not there."""
    parts = [(product(8, 4, 2, dtype="bf16"), 3), (product(8, 4, 2), 0.5), (product(2, 2, 2), 1), (addition(64), 9)]
    assert flops_by_dtype(parts) == {"bf16": 3 * 128, "fp32": 0.5 * 128 + 16}
    assert flops_by_dtype([]) == {}


def test_the_seed_of_attentions_backward_pass_is_no_dtype() -> None:
    """Its last inputs are two integers of the random state; it computes in the dtype of what comes first."""
    part, seed = tensor(4, 16, 128, 64, dtype="bf16"), tensor(dtype="uint64")
    name = "_scaled_dot_product_flash_attention_backward"
    backward = operation(name, (*(part,) * 5, seed, seed), (part,) * 3, 1000)
    forward = attention(128)
    assert flops_by_dtype([(backward, 1), (forward, 1)]) == {"bf16": 1000 + forward.flops}


def test_a_depthwise_convolution_uses_no_tensor_cores() -> None:
    """Memory bounds it, so that its arithmetic counts as fp32's whatever its dtype."""
    image, weight = tensor(2, 8, 16, 16, dtype="bf16"), tensor(8, 1, 3, 3, dtype="bf16")
    depthwise = operation("convolution", (image, weight), (image,), 500, groups=8)
    assert flops_by_dtype([(depthwise, 2)]) == {"fp32": 1000}
    assert set(flops_by_dtype([(convolution(dtype="bf16"), 1)])) == {"bf16"}


def test_tensor_cores_save_energy_only_where_there_are_any() -> None:
    """bf16 takes a fraction of fp32's energy on a chip whose datasheet rates it, and as much as fp32 on another."""
    with_cores, without = PowerModel.of(gpu()), PowerModel.of(gpu(dense_flops={"fp32": 19.5e12}))
    assert with_cores.joules_per_flop("bf16") < 0.2 * with_cores.joules_per_flop("fp32")
    assert without.joules_per_flop("bf16") == without.joules_per_flop("fp32")


def test_tensor_cores_of_a_graphics_chip_run_into_its_limit() -> None:
    """At 300 W an A6000 sustains two thirds of 147 TFLOP/s in bf16, and of 74 in tf32; an RTX 3090 all of 68."""
    shares = {
        (watts, rate, dtype): PowerModel.of(gpu(compute_capability="8.6", power_w=watts)).sustained_share(rate, dtype)
        for watts, rate, dtype in ((300.0, 147e12, "bf16"), (300.0, 73.5e12, "tf32"), (350.0, 68e12, "bf16"))
    }
    assert list(shares.values()) == pytest.approx([0.66, 0.66, 1.0], abs=0.02)
