"""A pruned network answers as the whole one with the same channels silenced, or it is not pruned there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stoker.compressing.channel_cuts import CannotPrune, prunable, sound_cut
from stoker.training.pruned_network import rebuild_pruned, silenced
from tests.compressing.pruning.networks import (
    Concatenated,
    Counting,
    Depthwise,
    Grouped,
    Residual,
    Tied,
    Transformer,
    ask,
    made,
)


@pytest.mark.parametrize(
    ("kind", "roots"),
    [
        (Residual, {"inner", "outer"}),
        (Concatenated, {"first", "second", "third"}),
        (Depthwise, {"depthwise", "point"}),
        (Transformer, {"wide"}),
        (Grouped, {"last"}),
    ],
)
def test_what_can_go_is_what_nobody_counts(kind: type[nn.Module], roots: set[str]) -> None:
    """Sums, concatenations and depthwise layers may lose channels; heads, norms over them, and groups may not."""
    assert {group.root for group in prunable(made(kind), ask)} == roots


def test_a_network_that_would_mean_something_else_is_refused() -> None:
    """Where shapes fit with fewer channels, but a norm over them or a mean counts them; and where they do not fit."""
    with pytest.raises(CannotPrune, match="computes something else"):
        sound_cut(made(Transformer), ask, {"embed": (0, 1, 2, 3)})
    with pytest.raises(CannotPrune, match="no channels can be taken out"):
        prunable(made(Counting), ask)


@pytest.mark.parametrize("kind", [Residual, Concatenated, Depthwise, Tied])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_channels_of_sound_groups_can_go(kind: type[nn.Module], data: st.DataObject) -> None:
    """The law holds of any choice of channels in all groups at once."""
    model = made(kind)
    removed = {
        group.root: tuple(sorted(data.draw(st.sets(st.integers(0, group.channels - 1), max_size=group.channels - 1))))
        for group in prunable(model, ask)
    }
    cut = sound_cut(model, ask, {root: channels for root, channels in removed.items() if channels})
    with torch.no_grad():
        found, wanted = ask(rebuild_pruned(model, cut))[0], ask(silenced(model, cut))[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
