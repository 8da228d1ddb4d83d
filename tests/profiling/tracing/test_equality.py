from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stoker.profiling.tracing.repetition import are_equal


def with_attribute(value: object) -> nn.Module:
    """A layer with one attribute more."""
    layer = nn.Linear(3, 3)
    layer.extra = value
    return layer


def test_weights_do_not_matter():
    """Layers of the same sizes are equal whatever they have learned."""
    assert are_equal([nn.Sequential(nn.Linear(3, 4), nn.ReLU()) for _ in range(3)])


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param([nn.Linear(3, 3), nn.Linear(3, 4)], id="sizes"),
        pytest.param([nn.Linear(3, 3), nn.Linear(3, 3, bias=False)], id="a parameter less"),
        pytest.param([nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)], id="frozen"),
        pytest.param([nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float64)], id="dtype"),
        pytest.param([nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())], id="class"),
        pytest.param([nn.Dropout(0.1), nn.Dropout(0.2)], id="rate"),
        pytest.param([nn.Linear(3, 3).eval(), nn.Linear(3, 3)], id="mode"),
    ],
)
def test_what_changes_the_work_makes_a_difference(modules):
    """Sizes, dtypes, classes, settings and modes."""
    assert not are_equal(modules)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"window": 4}, {"window": 8}),
        ([1, 2], (1, 2)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.relu, torch.sigmoid),
        (functools.partial(torch.softmax, dim=1), functools.partial(torch.softmax, dim=3)),
        (SimpleNamespace(kind="full"), SimpleNamespace(kind="sliding")),
        (True, 2),
        ("a", "b"),
    ],
)
def test_attributes_are_compared_by_what_they_hold(one, other):
    """Whatever a module keeps besides its weights."""
    assert not are_equal([with_attribute(one), with_attribute(other)])
    assert are_equal([with_attribute(one), with_attribute(one)])


def test_numbers_that_count_the_modules_are_no_difference():
    """A module may know its place, counted from anywhere, and nothing else that grows."""
    assert are_equal([with_attribute(5 + place) for place in range(4)])
    assert not are_equal([with_attribute(2 * place) for place in range(4)])
    assert not are_equal([with_attribute(0.0 + place) for place in range(4)])


def test_functions_are_told_by_their_code():
    """Two made by the same line are equal, two lines are not."""

    def made() -> object:
        return lambda x: x + 1

    assert are_equal([with_attribute(made()), with_attribute(made())])
    assert not are_equal([with_attribute(made()), with_attribute(lambda x: x + 1)])
