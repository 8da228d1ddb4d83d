import numpy as np
import pytest

from stoker.planning.model.gpu_kernels import Rates, product_seconds
from stoker.planning.model.gpu_roofline import BATCHED, PRODUCT

A100 = Rates(flops=18e12, bytes_per_s=1.4e12, multiprocessors=108)


def seconds(*sizes, rates=A100, shape=PRODUCT, element_bytes=4.0) -> float:
    """Time of one product."""
    return float(product_seconds(np.array([sizes], dtype=float), element_bytes, shape, rates)[0])


def test_a_large_product_takes_little_more_than_its_flops() -> None:
    """At 8192 cubed, tiles, waves and memory cost a few per cent of the time the rate alone gives."""
    ideal = 2 * 8192**3 / A100.flops
    assert ideal < seconds(1, 8192, 8192, 8192) < 1.12 * ideal


def test_a_product_of_one_tile_is_no_faster_on_more_multiprocessors() -> None:
    """What a single multiprocessor does is not helped by others: the depth is all that can be split."""
    few = Rates(flops=18e12, bytes_per_s=1.4e12, multiprocessors=108)
    many = Rates(flops=36e12, bytes_per_s=1.4e12, multiprocessors=216)
    assert seconds(1, 32, 32, 64, rates=many) == pytest.approx(seconds(1, 32, 32, 64, rates=few), rel=0.05)


def test_a_deep_product_of_few_tiles_is_split() -> None:
    """A depth of 65536 takes a small part of what one multiprocessor would, because its parts go to idle ones."""
    assert seconds(1, 128, 128, 65536) < 0.05 * 2 * 128 * 128 * 65536 / (A100.flops / A100.multiprocessors)


def test_a_thin_product_is_bound_by_memory() -> None:
    """Eight rows times a large matrix read the matrix: at a quarter of the bandwidth it takes four times as long."""
    slow = Rates(flops=18e12, bytes_per_s=0.35e12, multiprocessors=108)
    fast_s, slow_s = (seconds(1, 8, 16384, 16384, rates=rates) for rates in (A100, slow))
    assert fast_s > 16384 * 16384 * 4 / A100.bytes_per_s
    assert slow_s == pytest.approx(4 * 16384 * 16384 * 4 / A100.bytes_per_s, rel=0.05)
    assert slow_s > 3 * fast_s


def test_time_never_falls_when_a_product_grows() -> None:
    """Doubling any size of a product never makes it faster by more than a kernel's choice can (2 %)."""
    sizes = np.array([[1, 512, 768, 640], [12, 128, 96, 256]], dtype=float)
    before = product_seconds(sizes, 4.0, PRODUCT, A100)
    for column in range(4):
        larger = sizes.copy()
        larger[:, column] *= 2
        assert (product_seconds(larger, 4.0, PRODUCT, A100) >= 0.98 * before).all()


def test_batches_of_small_products_waste_more_than_single_ones() -> None:
    """Rows of half a tile cost batched products more than single ones: they have fewer kernels to choose from."""
    ratio = {
        shape: seconds(256, 64, 512, 512, shape=shape) / seconds(256, 512, 512, 512, shape=shape)
        for shape in (PRODUCT, BATCHED)
    }
    assert ratio[BATCHED] > ratio[PRODUCT] > 1 / 8
