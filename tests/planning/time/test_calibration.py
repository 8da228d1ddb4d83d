import pytest

from stoker.planning.model.gpu_roofline import PowerModel, Scales, Sustained, kind_of, roof_seconds
from stoker.planning.model.gpu_times import calibrate
from tests.planning.time.gpu_devices import (
    addition,
    attention,
    batched,
    gpu,
    layer_norm,
    measured,
    product,
    softmax,
    timing,
)

PRODUCTS = [product(64 * i, 128 * j, 256 * k) for i in (1, 4, 16) for j in (1, 5, 20) for k in (1, 7)]
STREAMS = [addition(n) for n in (10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8)]
ROWS = [layer_norm(rows, columns) for rows in (2048, 8192) for columns in (512, 1024, 4096)]


def sustained(hardware) -> Sustained:
    """What the datasheet promises."""
    return Sustained(hardware=hardware, power=PowerModel.of(hardware))


def slowed(operations, flops: float, bandwidth: float, alone_s: float = 2e-5):
    """Times on a device that does so much of the datasheet's rates, each operation measured alone."""
    model = sustained(gpu())
    return [
        timing(one, roof_seconds(one, *kind_of(one), model, Scales(flops, bandwidth)) + alone_s) for one in operations
    ]


def test_without_a_micro_benchmark_nothing_is_fitted() -> None:
    """The datasheet stands."""
    assert calibrate(sustained(gpu())).scales("product", "fp32") == Scales()


def test_the_rates_of_a_slower_device_are_found() -> None:
    """Of a device at 0.6 of the arithmetic and 0.8 of the bandwidth both are found, without the measurement's cost."""
    device = measured(gpu(), slowed([*PRODUCTS, *STREAMS], 0.6, 0.8))
    found = calibrate(sustained(device))
    assert found.scales("product", "fp32").flops == pytest.approx(0.6, rel=0.05)
    assert found.scales("stream", "").bandwidth == pytest.approx(0.8, rel=0.05)


def test_kinds_that_were_not_measured_borrow() -> None:
    """Attention in fp32 takes products' factors, softmax those of streams; another dtype stays with the datasheet."""
    found = calibrate(sustained(measured(gpu(), slowed([*PRODUCTS, *STREAMS], 0.6, 0.8))))
    assert found.scales("attention", "fp32") == found.scales("product", "fp32")
    assert found.scales("row", "softmax") == found.scales("stream", "")
    assert found.scales(*kind_of(attention(128))) == Scales()


def test_what_the_model_misses_is_kept_as_residuals() -> None:
    """Layer norms measured half as fast as streams tell so, and softmaxes are none the wiser."""
    timings = [*slowed(STREAMS, 1.0, 1.0), *slowed(ROWS, 1.0, 0.5)]
    found = calibrate(sustained(measured(gpu(), timings)))
    norm, soft = (found.scales(*kind_of(one)) for one in (layer_norm(64, 512), softmax(64, 512)))
    assert norm.bandwidth == pytest.approx(soft.bandwidth / 2, rel=0.1)
    assert ("row", "native_layer_norm") in found.residuals
    assert ("row", "softmax") not in found.residuals


def test_a_few_points_are_not_fitted_to() -> None:
    """Three points of a kind leave the datasheet as it is, and broken times are passed over."""
    few = [timing(batched(4, 64, 64, 64), 1.0)] * 3 + [timing(addition(100), 0.0)] * 9
    found = calibrate(sustained(measured(gpu(), few)))
    assert found.fitted == {}
