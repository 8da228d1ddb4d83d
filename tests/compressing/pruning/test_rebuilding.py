"""Pruned networks are made again from the right whole one alone."""

import pytest
import torch

from stoker.compressing.channel_cuts import cut_of
from stoker.errors import BadJob
from stoker.training.pruned_network import rebuild_pruned, silenced
from tests.compressing.pruning.networks import Concatenated, Residual, Tied, ask, made


def test_a_cut_of_another_network_is_refused() -> None:
    """The tensor that does not fit is named, with both shapes."""
    cut = cut_of(made(Residual), ask, {"inner": (0, 1)})
    with pytest.raises(BadJob, match=r"inner\.weight.*is not there"):
        rebuild_pruned(made(Concatenated), cut)
    other = made(Residual)
    other.inner = torch.nn.Conv2d(16, 20, 3, padding=1, bias=False)
    with pytest.raises(BadJob, match=r"inner.weight, of shape \[24, 16, 3, 3\], has shape \[20, 16, 3, 3\]"):
        rebuild_pruned(other, cut)


def test_shared_weights_stay_shared() -> None:
    """Two layers with one matrix have one still, and it is trained once."""
    model = made(Tied)
    small = rebuild_pruned(model, cut_of(model, ask, {"again": (3, 5)}))
    assert small.inner.weight is small.again.weight
    assert tuple(small.inner.weight.shape) == (14, 64)


def test_what_is_frozen_stays_frozen() -> None:
    """Whether a parameter is trained is taken over."""
    model = made(Residual)
    model.inner.weight.requires_grad_(requires_grad=False)
    small = rebuild_pruned(model, cut_of(model, ask, {"inner": (0, 1)}))
    assert not small.inner.weight.requires_grad
    assert small.outer.weight.requires_grad


def test_silenced_weights_are_those_that_go() -> None:
    """Zero where a channel goes, as they were where it stays."""
    model = made(Residual)
    quiet = silenced(model, cut_of(model, ask, {"inner": (0, 2)}))
    assert not quiet.inner.weight[[0, 2]].any()
    assert not quiet.outer.weight[:, [0, 2]].any()
    kept = [at for at in range(24) if at not in (0, 2)]
    assert torch.equal(quiet.inner.weight[kept], model.inner.weight[kept])
    assert torch.equal(quiet.first.weight, model.first.weight)
