import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.profiling.tracing.session import trace_step
from tests.profiling.tracing.jobs import allocator_sizes, settings, sizes_of


def _twice(x, weight):
    y = x @ weight
    return (torch.tanh(y) * torch.sigmoid(y)).sum()


def _same_gradient_on_both_ways(x, weight):
    y = x @ weight
    return (y + y).sum()


def _through_a_view(x, weight):
    y = x @ weight
    return (y.t().contiguous().sum() + torch.tanh(y).sum() + y.expand(16, 32).exp().sum()).sum()


def _bias_of_a_transposed_input(x, weight):
    rows = torch.stack([x, x]).transpose(0, 1)
    return F.linear(rows, weight.t(), weight[0]).tanh().sum()


def _bias_added_by_the_user(x, weight):
    return (x @ weight + weight[0]).tanh().sum()


@pytest.mark.parametrize(
    "loss",
    [_twice, _same_gradient_on_both_ways, _through_a_view, _bias_of_a_transposed_input, _bias_added_by_the_user],
)
def test_additions_are_in_place_where_pytorch_makes_them_so(loss):
    """The same tensors are allocated as by a real step, where gradients meet and where a bias is added."""
    weight = nn.Parameter(torch.ones(32, 32))
    x = torch.ones(16, 32)

    def step(batch):
        loss(batch, weight).backward()
        weight.grad = None

    traced = sorted(size for size in sizes_of(trace_step(step, x, settings())) if size >= 64)
    assert traced == sorted(size for size in allocator_sizes(lambda: step(x)) if size >= 64)
