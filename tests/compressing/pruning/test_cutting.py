"""What is read off a cut is what Torch-Pruning did, in every way that channels can belong together."""

import copy

import pytest
import torch
from torch import nn

from stoker.compressing import channel_cuts
from stoker.compressing.channel_cuts import CannotPrune, cut_of, groups_of
from stoker.records import dumps, loads
from stoker.records.compression import Cut
from stoker.training.pruned_network import rebuild_pruned
from tests.compressing.pruning.networks import Concatenated, Depthwise, Residual, Tied, ask, made

KINDS = [Residual, Concatenated, Depthwise, Tied]


def roots(model: nn.Module) -> dict[str, int]:
    """The groups of a model, and how many channels each has."""
    return {group.root: group.channels for group, _ in groups_of(copy.deepcopy(model), ask)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_makes_the_pruned_network_again_bit_for_bit(kind: type[nn.Module]) -> None:
    """By way of JSON: sizes, weights and answers are those of the network that the library cut itself."""
    model = made(kind)
    removed = {root: tuple(range(1, channels, 3)) for root, channels in roots(model).items()}
    assert removed
    cut = loads(dumps(cut_of(model, ask, removed)), Cut)
    small = rebuild_pruned(model, cut)
    pruned = copy.deepcopy(model)
    channel_cuts._prune(channel_cuts.dependency_graph(pruned, ask), removed)
    ours, theirs = small.state_dict(), pruned.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(ask(small)[0], ask(pruned)[0])
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    assert repr(small) == repr(pruned)


def test_the_model_itself_stays_as_it_was() -> None:
    """Neither weights nor mode nor what is trained change."""
    model = made(Residual).train()
    model.first.weight.requires_grad_(requires_grad=False)  # type: ignore[union-attr]
    before = copy.deepcopy(model.state_dict())
    cut_of(model, ask, {"inner": (0, 1)})
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.training
    assert not model.first.weight.requires_grad  # type: ignore[union-attr]


def test_channels_of_outputs_are_no_group() -> None:
    """What a client asked for has as many elements as before."""
    assert "head" not in roots(made(Residual))
    assert roots(made(Residual)) == {"inner": 24, "outer": 16}


def test_a_layer_that_would_lose_all_is_refused() -> None:
    """It is named."""
    with pytest.raises(CannotPrune, match=r"inner.*would lose all"):
        cut_of(made(Residual), ask, {"inner": tuple(range(24))})


def test_a_network_that_cannot_be_made_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the record miss anything that the library did, the cut does not pass."""
    monkeypatch.setattr(channel_cuts, "_sizes", lambda layer: {})

    def off(small: nn.Module, cut: Cut) -> nn.Module:
        other = rebuild_pruned(small, cut)
        with torch.no_grad():
            next(other.parameters()).add_(1e-3)
        return other

    monkeypatch.setattr(channel_cuts, "rebuild_pruned", off)
    with pytest.raises(CannotPrune, match="bit for bit"):
        cut_of(made(Residual), ask, {"inner": (0, 1)})


def test_a_network_that_raises_is_refused_with_what_it_says() -> None:
    """Its own error is in the sentence."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("nothing here")

    with pytest.raises(CannotPrune, match="KeyError"):
        groups_of(Broken(), ask)
