import pytest

from stoker.planning.model.gpu_kernels import row_bytes, row_sizes, stream_bytes
from tests.planning.time.gpu_devices import addition, gpu, layer_norm, operation, softmax, tensor


def passes(made, hardware, rows: int, columns: int) -> float:
    """How often a tensor crosses memory."""
    return row_bytes(made, hardware, 4.0) / (rows * columns * 4)


def test_a_layer_norm_reads_again_what_the_cache_cannot_hold() -> None:
    """On 40 MiB of cache rows of 1024 cross memory twice, rows of 16384 three times."""
    assert passes(layer_norm(4096, 1024), gpu(), 4096, 1024) == pytest.approx(2.0, abs=0.2)
    assert passes(layer_norm(4096, 16384), gpu(), 4096, 16384) == 3.0


def test_a_smaller_cache_misses_earlier() -> None:
    """The same rows cross memory more often on a device of 4 MiB."""
    small = gpu(l2_bytes=4 * 2**20)
    assert passes(layer_norm(4096, 2048), small, 4096, 2048) > passes(layer_norm(4096, 2048), gpu(), 4096, 2048)


def test_a_softmax_of_a_warp_reads_once() -> None:
    """Up to 1024 columns a row stays in registers, whatever the cache; long rows are read three times without one."""
    small = gpu(l2_bytes=2**20)
    assert passes(softmax(4096, 1024), small, 4096, 1024) == 2.0
    assert passes(softmax(4096, 16384), small, 4096, 16384) == 4.0


def test_rows_and_columns_of_what_is_normalised() -> None:
    """A layer norm's columns are its weights', a softmax's those of its dimension."""
    norm = operation("native_layer_norm", (tensor(2, 3, 8, 16), tensor(16), tensor(16)), (tensor(2, 3, 8, 16),))
    assert row_sizes(norm) == (48, 16)
    assert row_sizes(operation("_softmax", (tensor(4, 7, 5),), (tensor(4, 7, 5),), dim=1)) == (20, 7)


def test_operands_across_the_order_of_the_result_cost_a_sector_each() -> None:
    """A bias read with strides crosses memory eight times where the cache is smaller than the distance, else once."""
    plain = addition(1000)
    across = operation("add", plain.inputs, plain.outputs, strided_bytes=4000, strided_reach_bytes=8 * 2**20)
    assert stream_bytes(plain, gpu()) == stream_bytes(across, gpu()) == 12000
    assert stream_bytes(across, gpu(l2_bytes=6 * 2**20)) == 12000 + 7 * 4000
