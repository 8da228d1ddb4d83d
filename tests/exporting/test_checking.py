"""The checks themselves: each finds what it is for."""

import math
from dataclasses import replace

import numpy as np
import pytest

from stoker.errors import BadArtifact, ServiceError
from stoker.exporting.proofs import Trial, eight_samples, is_held, prove_alone, prove_equal, prove_padding
from stoker.records import DynamicDim, TensorSpec

IDS = TensorSpec(name="ids", datatype="FP32", shape=("batch", "tokens"), pad=0)
OUT = (TensorSpec(name="y", datatype="FP32", shape=("batch",)),)


def trial(tokens: int = 6) -> Trial:
    """Eight samples of so many tokens."""
    ids = np.random.default_rng(0).standard_normal((8, tokens)).astype(np.float32)
    return Trial(samples={"ids": ids}, inputs=(IDS,))


def total(asked: dict) -> dict:
    """The sum of each sample: right alone, together and padded."""
    return {"y": asked["ids"].sum(1)}


def test_what_is_right_holds() -> None:
    """All three checks, with no error at all or that of rounding."""
    for proof in (
        prove_equal("a", total, total, trial()),
        prove_alone("a", total, trial()),
        prove_padding("a", total, trial(), OUT),
    ):
        assert is_held(proof)
        assert proof.error < 1e-6


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_model_that_is_wrong_at_one_size_alone_is_found(size: int) -> None:
    """At each of the three; the error is that of the worst."""
    proof = prove_equal("a", lambda r: {"y": r["ids"].sum(1) * (2 if len(r["ids"]) == size else 1)}, total, trial())
    assert not is_held(proof)
    assert proof.error == pytest.approx(1, rel=1e-6)


def test_a_model_that_is_wrong_at_one_length_alone_is_found() -> None:
    """The middle request has its tokens cut to half."""
    proof = prove_equal("a", lambda r: {"y": r["ids"].sum(1) * (1 + (r["ids"].shape[1] == 3))}, total, trial())
    assert not is_held(proof)
    assert "3 samples (tokens 3)" in proof.what


def test_a_model_that_looks_at_its_neighbours_is_found() -> None:
    """A mean over the batch taken off."""
    proof = prove_alone("a", lambda r: {"y": r["ids"].sum(1) - r["ids"].sum(1).mean()}, trial())
    assert not is_held(proof)


def test_a_model_that_counts_what_was_filled_up_is_found() -> None:
    """A mean over all tokens."""
    proof = prove_padding("a", lambda r: {"y": r["ids"].mean(1)}, trial(), OUT)
    assert not is_held(proof)
    assert "tokens 3 in 6" in proof.what


def test_what_cannot_be_asked_or_is_nan_is_infinitely_far_with_its_reason() -> None:
    """The request and the library's words are in the proof."""

    def fails(asked: dict) -> dict:
        if len(asked["ids"]) == 3:
            raise ServiceError("no threes")
        return total(asked)

    proof = prove_equal("a", fails, total, trial())
    assert proof.error == math.inf
    assert proof.what.endswith("3 samples (tokens 3): no threes")
    proof = prove_alone("a", lambda r: {"y": r["ids"].sum(1) * math.nan}, trial())
    assert (proof.error, "the answer has NaN" in proof.what) == (math.inf, True)


def test_lengths_are_cut_no_further_than_is_allowed() -> None:
    """A model that needs five tokens is asked for five."""
    assert replace(trial(), dims=(DynamicDim(name="tokens", low=5),)).shorter == {"tokens": 5}


def test_a_request_without_a_batch_is_asked_at_two_sizes() -> None:
    """As it is, and cut shorter."""
    spec = replace(IDS, shape=("n", "tokens"))
    asked = [
        {name: array.shape for name, array in request.items()}
        for _, request in replace(trial(), inputs=(spec,)).requests()
    ]
    assert asked == [{"ids": (8, 6)}, {"ids": (4, 3)}]


def test_eight_samples_are_the_first_or_all_in_turn() -> None:
    """Of many and few; one alone could not show that a model looks at its neighbours."""
    assert eight_samples({"x": np.arange(20)})["x"].tolist() == list(range(8))
    assert eight_samples({"x": np.arange(3)})["x"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    with pytest.raises(BadArtifact, match=r"no common number of samples, two or more \(x: 1\)"):
        eight_samples({"x": np.arange(1)})
