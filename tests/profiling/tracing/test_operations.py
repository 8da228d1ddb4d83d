import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.profiling.tracing import trace_step
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
