from stoker.planning.model.gpu_kernels import attention_sizes, convolution_products, is_depthwise, product_sizes
from tests.planning.time.gpu_devices import attention, batched, convolution, operation, product, tensor


def flops_of(sizes) -> int:
    """Of a product."""
    batch, rows, columns, depth = sizes
    return 2 * batch * rows * columns * depth


def test_sizes_of_matrix_products() -> None:
    """Of single, biased and batched products: batch, rows, columns, depth; shapes that tell nothing give None."""
    biased = operation("addmm", (tensor(7), tensor(5, 3), tensor(3, 7)), (tensor(5, 7),))
    assert product_sizes(product(5, 7, 3)) == product_sizes(biased) == (1, 5, 7, 3)
    assert product_sizes(batched(2, 5, 7, 3)) == (2, 5, 7, 3)
    assert product_sizes(operation("mm", (tensor(5),), (tensor(5),))) is None


def test_an_implicit_product_does_the_flops_of_the_convolution() -> None:
    """The first way of each part, forward and backward, has as many FLOPs as the convolution is said to have."""
    forward = convolution_products(convolution())
    backward = convolution_products(convolution("convolution_backward", output_mask=[True, True, False]))
    assert [flops_of(ways[0][0]) for ways in forward] == [convolution().flops]
    assert [flops_of(ways[0][0]) for ways in backward] == [convolution().flops] * 2


def test_parts_of_a_backward_pass_that_nobody_wants_cost_nothing() -> None:
    """Without the image's gradient only the weight's is left."""
    parts = convolution_products(convolution("convolution_backward", output_mask=[False, True, False]))
    assert [ways[0][0] for ways in parts] == [(1, 64, 64 * 9, 32 * 56 * 56)]


def test_winograd_needs_fewer_flops_and_only_three_by_three() -> None:
    """Tiles of 4 x 4 results do a quarter of the FLOPs; other windows have no such way."""
    implicit, small, large = convolution_products(convolution())[0]
    assert flops_of(large[0]) == flops_of(implicit[0]) / 4 < flops_of(small[0]) < flops_of(implicit[0])
    assert len(convolution_products(convolution(window=5))[0]) == 1


def test_a_depthwise_convolution_is_told_apart() -> None:
    """One channel per group: memory bounds it."""
    image, weight = tensor(8, 64, 28, 28), tensor(64, 1, 3, 3)
    assert is_depthwise(operation("convolution", (image, weight), (image,), groups=64))
    assert not is_depthwise(convolution())


def test_sizes_of_attention() -> None:
    """Heads of all samples, queries, keys, width."""
    assert attention_sizes(attention(512)) == (64, 512, 512, 64)
    assert attention_sizes(operation("attention", (tensor(3, 4),), (tensor(3, 4),))) is None
