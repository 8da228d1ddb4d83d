from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.stepping.diloco_exchange import fragments_of


def model() -> nn.Module:
    """A convolution in another memory format than its bias, and a layer."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 5)).to(memory_format=torch.channels_last)


def vector(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy of all elements, in the order of their indices."""
    return torch.cat([one.detach().reshape(-1) for one in parameters])


@pytest.mark.parametrize("count", [1, 3, 7])
def test_fragments_are_all_parameters_in_order(count: int) -> None:
    """Put one after the other they are the parameters, and none is longer than another by more than one."""
    parameters = list(model().parameters())
    fragments = fragments_of(parameters, count)
    sizes = [fragment.size for fragment in fragments]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([one.read() for one in fragments]), vector(parameters))


@pytest.mark.parametrize("count", [1, 3, 7])
def test_what_is_written_is_read(count: int) -> None:
    """Values go to their places in any memory format, and nowhere else."""
    written = model()
    assert not written[0].weight.is_contiguous()
    for fragment in fragments_of(written.parameters(), count):
        before = vector(written.parameters())
        fragment.write(fragment.read() + 1)
        after = vector(written.parameters())
        assert int((before != after).sum()) == fragment.size
    assert not written[0].weight.is_contiguous()


def test_one_double_makes_all_of_them_double() -> None:
    """Rows are of the widest dtype, so that nothing is rounded on the way."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    assert fragments_of(parameters, 1)[0].read().dtype == torch.float64


def test_more_fragments_than_parameters_are_refused() -> None:
    """A fragment of nothing is no fragment."""
    with pytest.raises(BadJob, match="3 trained parameters cannot be cut into 4 fragments"):
        fragments_of([nn.Parameter(torch.ones(3))], 4)
