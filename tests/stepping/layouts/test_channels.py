"""What one end of a way between stages puts in, the other takes out."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker.stepping.layouts import pipeline
from stoker.stepping.layouts.pipeline import StageChannel


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[StageChannel, StageChannel, deque[torch.Tensor]]:
    """Both ends of a way within this process, and what is under way."""
    under_way: deque[torch.Tensor] = deque()

    def send(tensor: torch.Tensor, **_: Any) -> Any:
        under_way.append(tensor.clone())
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def receive(empty: torch.Tensor, **_: Any) -> None:
        came = under_way.popleft()
        assert (came.shape, came.dtype) == (empty.shape, empty.dtype), "taken for another tensor"
        empty.copy_(came)

    monkeypatch.setattr(pipeline, "_neighbour", lambda group, _around, step: (group, step))
    monkeypatch.setattr(pipeline, "dist", SimpleNamespace(isend=send, recv=receive))
    group: Any = SimpleNamespace()
    return StageChannel(group, 1, torch.device("cpu")), StageChannel(group, 1, torch.device("cpu")), under_way


def test_the_form_of_a_kind_is_told_once(ends: tuple[StageChannel, StageChannel, deque[torch.Tensor]]) -> None:
    """The first of a kind comes behind its shape and dtype, the others alone."""
    near, far, under_way = ends
    near.send(torch.ones(2, 3), "a")
    assert len(under_way) == 2
    assert torch.equal(far.receive("a"), torch.ones(2, 3))
    near.send(torch.zeros(2, 3), "a")
    assert len(under_way) == 1
    assert torch.equal(far.receive("a"), torch.zeros(2, 3))


def test_without_a_kind_every_tensor_tells_its_form(
    ends: tuple[StageChannel, StageChannel, deque[torch.Tensor]],
) -> None:
    """So that tensors of several shapes and dtypes, of which nothing is known, come out as they went in."""
    near, far, _ = ends
    for tensor in (torch.ones(4, 2), torch.ones(1, 2), torch.ones(3, dtype=torch.float64)):
        near.send(tensor, None)
        assert torch.equal(far.receive(None), tensor)
