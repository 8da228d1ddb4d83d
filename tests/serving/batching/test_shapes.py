"""Rows, lanes and shelves of requests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.records import DynamicDim, TensorSpec
from stoker.serving.batching.queue import STEPS_PER_DOUBLING, Shapes, round_up
from tests.serving.batching.models import FIXED, IMAGES, TOKENS, manifest, token_inputs


def test_samples_of_fixed_shape_share_one_shelf() -> None:
    """Without named dimensions there is one shape, of one position."""
    rows, shape = Shapes(FIXED).measure({"x": np.zeros((3, 4))})
    assert (rows, shape.lane, shape.sizes, shape.elements) == (3, (), (), 1)


def test_dimensions_that_can_be_padded_are_sizes_and_others_are_lanes() -> None:
    """Token counts share a lane, image sizes do not."""
    _, short = Shapes(TOKENS).measure(token_inputs(1, 9))
    _, long = Shapes(TOKENS).measure(token_inputs(1, 100))
    assert short.lane == long.lane == ()
    assert (short.sizes, long.sizes) == ((9,), (100,))
    _, image = Shapes(IMAGES).measure({"image": np.zeros((2, 5, 7))})
    assert (image.lane, image.sizes, image.elements) == ((5, 7), (), 35)


def test_one_input_without_padding_keeps_its_dimension_from_being_padded() -> None:
    """A dimension is padded only if every input that has it says with what."""
    mixed = manifest((*TOKENS.inputs, TensorSpec(name="weights", datatype="FP32", shape=("batch", "tokens"))), ())
    assert Shapes(mixed).padded_dims == ()


def test_a_model_without_a_batch_takes_requests_one_by_one() -> None:
    """Where nothing says what the first dimension is, a request is a row."""
    single = manifest(
        (TensorSpec(name="x", datatype="FP32", shape=("points", 3)),),
        (TensorSpec(name="y", datatype="FP32", shape=("points",)),),
    )
    rows, shape = Shapes(single).measure({"x": np.zeros((5, 3))})
    assert (rows, shape.lane) == (1, (5,))


@pytest.mark.parametrize(("size", "bucket"), [(1, 16), (16, 16), (17, 64), (65, 65)])
def test_sizes_go_up_to_the_next_bucket(size: int, bucket: int) -> None:
    """Buckets of the user's are taken as they are; beyond the last there is no padding."""
    shapes = Shapes(TOKENS, (64, 16))
    _, shape = shapes.measure(token_inputs(1, size))
    assert shape.shelf == (bucket,)
    assert shapes.padded([shape]) == (bucket,)


def test_without_buckets_a_batch_is_padded_to_its_largest() -> None:
    """Shelves sort what waits, and cost no padding."""
    shapes = Shapes(TOKENS)
    batch = [shapes.measure(token_inputs(1, size))[1] for size in (33, 37)]
    assert batch[0].shelf == batch[1].shelf == (40,)
    assert shapes.padded(batch) == (37,)


def test_nothing_is_padded_beyond_the_largest_size_the_model_takes() -> None:
    """The manifest's limit holds for shelves and buckets too."""
    limited = dataclasses.replace(TOKENS, dims=(DynamicDim(name="tokens", high=100),))
    assert Shapes(limited).sample((), (99,)).shelf == (100,)
    assert Shapes(limited, (128,)).sample((), (99,)).shelf == (100,)


def test_what_is_remembered_of_shapes_is_bounded() -> None:
    """A client that sends ever other sizes does not fill the memory."""
    shapes = Shapes(IMAGES)
    for height in range(1, 200):
        for width in range(1, 50):
            shapes.measure({"image": np.empty((1, height, width), np.uint8)})
    assert len(shapes._known) <= 4096


@given(st.integers(1, 100_000))
def test_rounding_up_wastes_at_most_a_step(size: int) -> None:
    """A shelf is never smaller than the size, nor larger by more than one of the steps in its doubling."""
    rounded = round_up(size)
    assert size <= rounded <= size * (1 + 1 / STEPS_PER_DOUBLING)
    assert round_up(rounded) == rounded
