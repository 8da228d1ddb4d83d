import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.planning.model.gpu_kernels import product_sizes
from stoker.profiling.tracing.session import trace_step
from stoker.records import Operation, TensorShape
from tests.profiling.tracing.jobs import settings


def _operations(step, *tensors, target="cuda") -> list[Operation]:
    trace = trace_step(lambda batch: step(*batch), tensors, settings(target))
    return [trace.operations[one.operation] for one in trace.occurrences]


def test_bytes_are_what_crosses_memory_once():
    """Operands are read once, results written once; a broadcast dimension and an operand taken twice count once."""
    (added,) = _operations(lambda a, b: a + b.expand(64, 32), torch.ones(64, 32), torch.ones(32))
    assert (added.bytes_read, added.bytes_written) == (4 * (64 * 32 + 32), 4 * 64 * 32)
    (squared,) = _operations(lambda a: a * a, torch.ones(64, 32))
    assert squared.bytes_read == 4 * 64 * 32
    (in_place,) = _operations(lambda a: a.mul_(2), torch.ones(64, 32))
    assert (in_place.bytes_read, in_place.bytes_written) == (4 * 64 * 32, 4 * 64 * 32)
    (filled,) = _operations(lambda a: a.zero_(), torch.ones(64, 32))
    assert (filled.bytes_read, filled.bytes_written) == (0, 4 * 64 * 32)


def test_lookup_reads_the_rows_it_takes():
    """An embedding reads as much of its table as it writes, and its indices."""
    (looked_up,) = _operations(
        lambda rows, table: F.embedding(input=rows, weight=table),
        torch.zeros(8, dtype=torch.int64),
        torch.ones(1000, 16),
    )
    assert (looked_up.bytes_read, looked_up.bytes_written) == (8 * 16 * 4 + 8 * 8, 8 * 16 * 4)


def test_a_loss_reads_the_targets_logarithms_alone():
    """Of each row one element, and in the gradient none: that is zeros with one number in each row."""
    rows, targets = torch.zeros(64, 1000), torch.zeros(64, dtype=torch.int64)
    (loss,) = _operations(lambda x, y: torch.ops.aten.nll_loss_forward(x, y, None, 1, -100), rows, targets)
    assert (loss.name, loss.bytes_read) == ("nll_loss_forward", 64 * 4 + 64 * 8)

    def gradient(x, y, seed, weight):
        return torch.ops.aten.nll_loss_backward(seed, x, y, None, 1, -100, weight)

    (back,) = _operations(gradient, rows, targets, torch.ones(()), torch.ones(()))
    assert (back.bytes_read, back.bytes_written) == (64 * 8 + 4 + 4, 64 * 1000 * 4)


def test_inputs_of_one_shape_that_no_neighbour_has_are_counted():
    """A residual and a gate come from outside of what follows a product, its own result too; what was read does not."""

    def step(x, weight, gate, residual):
        made = torch.sigmoid(x @ weight)
        gated = made * gate
        return gated + residual, gated * gate

    square = [torch.ones(8, 8) for _ in range(4)]
    _, *after = _operations(step, *square)
    assert [one.attribute("num_outside", 0) for one in after] == [0, 1, 1, 0]
    assert [one.attribute("num_outside", 0) for one in _operations(step, *square, target="cpu")] == [0] * 5
    (first,) = _operations(lambda a, b: a + b, *square[:2])
    assert first.attribute("num_outside") == 2


def test_a_cast_that_a_pass_has_made_before_is_known():
    """Each layer casts its input under autocast; what was written to in between is another input."""

    def step(x, weight):
        half = torch.bfloat16
        first, second = x.to(half), x.to(half)
        x.mul_(2)
        third = x.to(half) + weight[0].to(half)
        return first, second, third, weight[1].to(half)

    matrix = torch.ones(8, 8)
    casts = [one for one in _operations(step, matrix, torch.ones(8, 8)) if one.name == "_to_copy"]
    assert [one.attribute("is_again", False) for one in casts] == [False, True, False, False, False]
    here = [one for one in _operations(step, matrix, torch.ones(8, 8), target="cpu") if one.name == "_to_copy"]
    assert not any(one.attribute("is_again") for one in here)


def test_views_are_left_out_and_allocations_are_not():
    """What moves no data is no operation, unless memory is allocated by it."""
    names = [one.name for one in _operations(lambda a: a.view(32, 64).t().unsqueeze(0).detach(), torch.ones(64, 32))]
    assert names == []
    (empty,) = _operations(lambda a: torch.empty_like(a, dtype=a.dtype), torch.ones(64, 32))
    assert (empty.name, empty.bytes_read, empty.bytes_written) == ("empty_like", 0, 0)


def test_products_tell_how_their_operands_lie():
    """A transposed operand is one whose columns lie side by side in memory."""
    (product,) = _operations(lambda a, b: a @ b.t(), torch.ones(8, 16), torch.ones(4, 16))
    assert (product.attribute("transpose_a"), product.attribute("transpose_b")) == (False, True)
    assert product.flops == 2 * 8 * 16 * 4
    assert product.inputs == (TensorShape(shape=(8, 16), dtype="fp32"), TensorShape(shape=(16, 4), dtype="fp32"))


@pytest.mark.parametrize(
    ("layer", "multiply_adds"),
    [
        (nn.Conv2d(6, 12, 3, bias=False), 2 * 7 * 7 * 12 * 6 * 9),
        (nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=3, bias=False), 2 * 5 * 5 * 12 * 2 * 9),
        (nn.Conv2d(6, 6, 3, groups=6, bias=False), 2 * 7 * 7 * 6 * 9),
        (nn.Conv1d(6, 8, 3, groups=2, bias=False), 2 * 79 * 8 * 3 * 3),
        (nn.Conv3d(6, 4, 2, groups=2, bias=False), 2 * 2 * 2 * 8 * 4 * 3 * 8),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, bias=False), 2 * 9 * 9 * 6 * 4 * 9),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2, bias=False), 2 * 9 * 9 * 6 * 2 * 9),
    ],
    ids=["plain", "grouped", "depthwise", "1d", "3d", "transposed", "transposed and grouped"],
)
def test_flops_of_convolutions_are_the_closed_form(layer, multiply_adds):
    """Positions x weights for the result, and as many again for each gradient, whatever the groups."""
    shape = {3: (2, 6, 81), 4: (2, 6, 9, 9), 5: (2, 6, 3, 3, 9)}[layer.weight.dim()]

    def step(images):
        layer(images).sum().backward()

    flops = {one.name: one.flops for one in _operations(step, torch.ones(shape, requires_grad=True)) if one.flops}
    assert flops == {"convolution": 2 * multiply_adds, "convolution_backward": 4 * multiply_adds}
    only_weight = {one.name: one.flops for one in _operations(step, torch.ones(shape)) if one.flops}
    assert only_weight["convolution_backward"] == 2 * multiply_adds


def test_flops_of_products_without_a_formula_in_pytorch_are_the_closed_form():
    """Matrix by vector, dot, summed and grouped products: two for each multiply-add."""
    matrix, vector = torch.ones(5, 7), torch.ones(7)
    a, b = torch.ones(3, 4, 6), torch.ones(3, 6, 2)
    cases = [
        (lambda m, v: m @ v, (matrix, vector), 2 * 5 * 7),
        (lambda m, v: torch.addmv(torch.ones(5, device=m.device), m, v), (matrix, vector), 2 * 5 * 7),
        (lambda v, w: v @ w, (vector, torch.ones(7)), 2 * 7),
        (lambda x, y: torch.addbmm(torch.ones(4, 2, device=x.device), x, y), (a, b), 2 * 3 * 4 * 6 * 2),
    ]
    for step, tensors, flops in cases:
        assert sum(one.flops for one in _operations(step, *tensors)) == flops


@pytest.mark.parametrize(
    ("a", "b", "sizes"),
    [
        ((64, 32), (4, 32, 16), (4, 16, 16, 32)),
        ((4, 8, 32), (4, 32, 16), (4, 8, 16, 32)),
        ((32, 64), (64, 16), (4, 32, 16, 16)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_of_experts_have_flops_and_sizes(a, b, sizes, dtype):
    """Mixtures of experts multiply by `_grouped_mm`, whose groups divide the rows, or the depth of a gradient."""
    ends = None if len(a) == len(b) == 3 else torch.tensor([16, 32, 48, 64], dtype=torch.int32)

    def step(x, y, *given):
        return torch._grouped_mm(x, y, offs=given[0] if given else None)

    given = () if ends is None else (ends,)
    found = _operations(step, torch.ones(a, dtype=dtype), torch.ones(b, dtype=dtype), *given)
    (product,) = [one for one in found if one.name == "_grouped_mm"]
    assert product_sizes(product) == sizes
    assert product.flops == 2 * math.prod(sizes)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_flops_of_fused_attention_are_two_products_forward_and_five_backward(target):
    """Fused attention counts all pairs of queries and keys, with fewer heads of keys than of queries too."""
    heads, queries, keys, width = 4, 32, 16, 8

    def step(q, k, v):
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    tensors = [torch.ones(2, heads, n, width, requires_grad=True) for n in (queries, keys, keys)]
    found = [one for one in _operations(step, *tensors, target=target) if "attention" in one.name]
    pair = 2 * 2 * heads * queries * keys * width
    assert [one.flops for one in found] == [2 * pair, 5 * pair]


def test_convolutions_tell_their_geometry():
    """Stride, padding, dilation, groups and layout set a convolution's time, forward and backward."""

    def step(images, weight):
        F.conv2d(images, weight, stride=2, padding=1, groups=2).sum().backward()

    images = torch.ones(2, 4, 8, 8, requires_grad=True).to(memory_format=torch.channels_last)
    weight = nn.Parameter(torch.ones(6, 2, 3, 3))
    found = {one.name: dict(one.attributes) for one in _operations(step, images, weight) if "conv" in one.name}
    expected = {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "groups": 2, "transposed": False}
    assert found["convolution"] == {**expected, "channels_last": True}
    assert found["convolution_backward"].items() >= expected.items()
    assert found["convolution_backward"]["output_mask"][1] is True


def test_a_convolution_counts_what_it_has_to_bring_into_channels_last():
    """Weights in channels-last and an image that is not, as after a group norm: PyTorch copies the image on a GPU."""
    image, weight = torch.ones(2, 4, 8, 8), torch.ones(4, 4, 3, 3)
    last = {"memory_format": torch.channels_last}
    (mixed,) = _operations(F.conv2d, image, weight.to(**last))
    assert mixed.attribute("reordered_bytes") == 2 * 4 * 8 * 8 * 4
    for images, weights in ((image, weight), (image.to(**last), weight.to(**last))):
        (same,) = _operations(F.conv2d, images, weights)
        assert same.attribute("reordered_bytes") is None
    (here,) = _operations(F.conv2d, image, weight.to(**last), target="cpu")
    assert here.attribute("reordered_bytes") is None


@pytest.mark.parametrize(
    ("step", "is_indexed"),
    [
        (lambda a, _: a + 1.0, False),
        (lambda a, b: a * b, True),
        (lambda a, _: a * a, False),
        (lambda a, _: a.transpose(1, 2).contiguous(), True),
        (lambda a, _: a.transpose(1, 2) + 1.0, False),
        (lambda a, _: torch.cat([a, a]), False),
        (lambda a, _: a[:8] + 1.0, False),
        (lambda a, _: a[:, :2].mul_(2.0), True),
        (lambda a, _: a[:1] + a[1:2].expand(1, -1, -1), False),
        (lambda a, _: a[:1].transpose(0, 1) + a[0].unsqueeze(1), False),
        (lambda a, _: torch.stack([a[0], a[1]]), False),
    ],
    ids=[
        "number",
        "expanded",
        "alike",
        "another order",
        "the same order",
        "joined",
        "a part",
        "a part in place",
        "one sample",
        "dimensions of one element",
        "stacked",
    ],
)
def test_elementwise_operations_tell_whether_addresses_are_computed_from_indices(step, is_indexed):
    """Where a tensor is expanded, or lies in another order than the result, or with gaps; on a GPU alone."""
    for size, target, expected in ((64, "cuda", is_indexed), (64, "cpu", False), (4, "cuda", is_indexed)):
        tensors = torch.ones(16, size, size), torch.ones(size)
        found = _operations(step, *tensors, target=target)[-1]
        assert (found.attribute("is_indexed") is True) == expected


@pytest.mark.parametrize(
    "step",
    [lambda a, b: a @ b.T, lambda a, b: F.nll_loss(a, b[: len(a), 0].long()), lambda a, b: b[a[:, 0].long()]],
    ids=["product", "loss", "look-up"],
)
def test_operations_on_square_matrices_are_not_elementwise(step):
    """Although their shapes are: else traces of other numbers of samples would differ from one of so many rows."""
    for num_rows in (64, 32):
        found = _operations(step, torch.ones(num_rows, 64), torch.ones(64, 64))[-1]
        assert found.attribute("is_indexed") is None


def test_reductions_and_softmaxes_tell_their_dimension():
    """Rows along another dimension are another kernel."""
    softmax, total = _operations(lambda a: a.softmax(1).sum(0), torch.ones(4, 8))
    assert (softmax.attribute("dim"), total.attribute("dim")) == (1, [0])


@pytest.mark.parametrize("is_fused", [None, True])
def test_lists_are_flattened(is_fused):
    """An operation over lists of tensors takes and gives all of them."""
    parameters = [nn.Parameter(torch.ones(size)) for size in (3, 5)]
    optimizer = torch.optim.AdamW(parameters, fused=is_fused)

    def step(_batch):
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()

    operations = _operations(step, torch.ones(1))
    name = "_fused_adamw_" if is_fused else "_foreach_addcdiv_"
    (update,) = [one for one in operations if one.name == name]
    assert {shape.shape for shape in update.outputs} >= {(3,), (5,)}
    if is_fused:
        assert update.bytes_written == 3 * 4 * (3 + 5)  # weights and two averages; the gradients are only read
