"""The least important channels go, layer by layer in numbers that engines like."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.compressing.channel_importance import MOST_REMOVED, MULTIPLE, removed_at

SCORES = st.dictionaries(
    st.sampled_from("abcd"),
    st.lists(st.floats(0, 1), min_size=8, max_size=70).map(np.array),
    min_size=1,
)


@given(scores=SCORES, one=st.floats(0, 1), other=st.floats(0, 1))
def test_more_of_the_same_go_at_a_larger_share(scores: dict[str, np.ndarray], one: float, other: float) -> None:
    """Whatever goes at a share goes at a larger one too; so speed is a matter of the share alone."""
    few, many = (removed_at(scores, ratio) for ratio in sorted((one, other)))
    for layer, channels in few.items():
        assert set(channels) <= set(many[layer])


@given(scores=SCORES, ratio=st.floats(0, 1))
def test_layers_keep_enough_in_multiples(scores: dict[str, np.ndarray], ratio: float) -> None:
    """A layer that loses any keeps a multiple of eight, at least an eighth, and the best of its own."""
    for layer, channels in removed_at(scores, ratio).items():
        own = scores[layer]
        kept = np.setdiff1d(np.arange(len(own)), channels)
        assert len(kept) % MULTIPLE == 0
        assert len(kept) >= (1 - MOST_REMOVED) * len(own)
        assert own[list(channels)].max() <= own[kept].min()


def test_layers_are_compared_with_one_another() -> None:
    """A layer of unimportant channels loses before one of important ones does."""
    scores = {"dull": np.linspace(0, 1, 32), "bright": np.linspace(10, 11, 32)}
    assert removed_at(scores, 0.25) == {"dull": tuple(range(16))}
    assert removed_at(scores, 0.0) == {}
