from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.golden.curves import CURVES, UPDATES, committed, losses

RELATIVE = 1e-12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are added in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CURVES)
def test_losses_are_the_committed_ones(name: str) -> None:
    """Thirty losses in float64 agree to 1e-12; if the change is meant, run `python -m tests.golden.regenerate`."""
    expected = committed()[name]
    found = losses(name)
    assert len(expected) == UPDATES
    apart = [
        (update, ours, theirs)
        for update, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        if abs(ours - theirs) > RELATIVE * abs(theirs)
    ]
    assert not apart, f"from update {apart[0][0] + 1} on: {apart[0][1]!r}, committed {apart[0][2]!r}"


@pytest.mark.parametrize("name", CURVES)
def test_curves_learn(name: str) -> None:
    """A golden curve that does not fall would hide a broken update."""
    curve = committed()[name]
    assert min(curve[-5:]) < 0.9 * curve[0]
