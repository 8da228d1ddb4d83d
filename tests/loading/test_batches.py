from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.jobs import Holdout
from stoker.jobs.fields import Fields
from stoker.jobs.run_length import Extent
from stoker.loading.batches import Batch, InputPipeline, in_order
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.fields import map_tensors
from stoker.loading.samples import hold_out
from stoker.loading.transforms import (
    ColorJitter,
    Cutout,
    Normalize,
    OneOf,
    RandomFlip,
    RandomGrayscale,
    RandomRotation,
    RandomShift,
    Sometimes,
)
from stoker.records import Position
from tests.loading.data import Failing, Growing, Noisy, Squares, contents, source_of

CPU = torch.device("cpu")
IMAGES = torch.randint(0, 255, (30, 2, 5, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
LABELS = torch.arange(30)


def leaves(content: Any) -> list[torch.Tensor]:
    """The tensors of a batch."""
    found: list[torch.Tensor] = []
    map_tensors(content, found.append)
    return found


def are_equal(one: Any, other: Any) -> bool:
    """Whether two batches have the same tensors."""
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def images_of(loader: str) -> Any:
    """The images as arrays, or as a data set of items."""
    data = (IMAGES, LABELS) if loader == "memory" else list(zip(IMAGES, LABELS, strict=True))
    return as_samples(data, what="data")


@pytest.mark.parametrize("loader", ["memory", "inline"])
@settings(max_examples=25)
@given(batch=st.integers(1, 35), start=st.integers(0, 12), count=st.integers(0, 6))
def test_batches_from_any_position_are_those_of_the_whole_stream(
    loader: str, batch: int, start: int, count: int
) -> None:
    """A run that is resumed sees what it would have seen, random augmentation included."""
    augment = (RandomShift(2), RandomFlip())
    source = source_of(images_of(loader), batch, loader, augment=augment)
    whole = contents(source, 0, start + count)[start:]
    again = contents(source_of(images_of(loader), batch, loader, augment=augment), start, start + count)
    assert len(again) == count
    assert all(map(are_equal, whole, again))


def test_arrays_and_items_give_the_same_batches() -> None:
    """The loader is the plan's business: it changes nothing."""
    one, other = (contents(source_of(images_of(loader), 7, loader), 0, 9) for loader in ("memory", "inline"))
    assert all(map(are_equal, one, other))


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 4))
def test_every_epoch_has_every_sample_once_and_no_batch_has_two_epochs(size: int, batch: int, epochs: int) -> None:
    """The ragged last batch is a batch of its own, and each epoch has an order of its own."""
    source = source_of(as_samples((torch.arange(size),), what="data"), batch, "memory")
    total = source.extent.updates_per_epoch * epochs
    orders: dict[int, list[int]] = {}
    for found in source.batches(Position(), total):
        assert found.size <= batch
        orders.setdefault(found.epoch, []).extend(found.cut(0, found.size)[0].tolist())
    assert sorted(orders) == list(range(epochs))
    assert all(sorted(order) == list(range(size)) for order in orders.values())
    if size > 20:
        assert len({tuple(order) for order in orders.values()}) == epochs


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(1, 21), st.integers(0, 3))
def test_a_batch_in_parts_is_the_whole_batch(size: int, micro_batch: int, epoch: int) -> None:
    """Whatever the micro-batch, each sample is augmented in the same way, and its label stays with it."""
    indices = np.arange(size, dtype=np.int64)[::-1].copy()
    augment = (RandomShift(1), RandomFlip())
    samples = images_of("memory")
    pipeline = InputPipeline(CPU, Fields(), samples.prepare, augment, seed=4)
    batch = Batch(samples.fetch(indices, epoch), indices, epoch, pipeline)
    whole = batch.cut(0, size)
    parts = [batch.cut(start, min(start + micro_batch, size)) for start in range(0, size, micro_batch)]
    assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])
    assert not size > 5 or not torch.equal(whole[0], IMAGES[indices])


def test_a_sample_is_augmented_anew_in_every_epoch() -> None:
    """Its draws are keyed by the epoch too."""
    source = source_of(images_of("memory"), 30, "memory", augment=(RandomShift(2),))
    epochs = contents(source, 0, 2)
    one, other = (inputs[labels.argsort()] for inputs, labels in epochs)
    num_alike = sum(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert num_alike < 10  # by chance, one in 25


def test_a_batch_that_cannot_be_cut_is_said_to_be_so() -> None:
    """Giving every micro-batch all samples would be silent and wrong; the whole batch is fine."""
    samples = as_samples(Squares(8), what="data", collate=lambda items: {"packed": torch.zeros(len(items) * 3)})
    (batch,) = source_of(samples, 8).batches(Position(), 1)
    assert batch.cut(0, 8)["packed"].shape == (24,)
    with pytest.raises(BadJob, match="a batch of 8 samples cannot be cut: no tensor in it has 8 rows"):
        batch.cut(0, 4)


def test_what_goes_into_a_batch_is_of_one_type_however_it_is_cut() -> None:
    """A loss that takes (model, batch) sees the same containers for a whole batch and for a part."""
    for content in (images_of("memory").fetch(np.arange(4), 0), images_of("inline").fetch(np.arange(4), 0)):
        batch = Batch(content, np.arange(4), 0, InputPipeline(CPU, Fields(), lambda raw: raw, (RandomFlip(),)))
        assert type(batch.cut(0, 4)) is type(batch.cut(0, 2)) is type(content)


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_content_is_prepared_in_the_plans_form(dtype: torch.dtype | None, channels_last: bool) -> None:
    """Prepared after augmentation; floats in the dtype asked for; images in the memory format, whole numbers alone."""
    seen: list[torch.dtype] = []

    def prepare(content: Any) -> Any:
        seen.append(content[0].dtype)
        return content[0].float() / 255, content[1]

    pipeline = InputPipeline(CPU, Fields(), prepare, (RandomShift(1),), channels_last=channels_last, dtype=dtype)
    inputs, labels = pipeline((IMAGES, LABELS), 0, np.arange(30))
    assert seen == [torch.uint8]
    assert (inputs.dtype, labels.dtype) == (dtype or torch.float32, torch.int64)
    assert inputs.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert inputs.shape == IMAGES.shape


@pytest.mark.parametrize(
    ("transform", "target", "name"),
    [
        (RandomFlip(), torch.zeros(4, 6, 6), "RandomFlip"),
        (RandomFlip(), torch.zeros(4, 1, 6, 6), "RandomFlip"),
        (OneOf([Cutout(2), [RandomRotation(5)]]), torch.zeros(4, 6, 6), "RandomRotation"),
        (Sometimes(RandomShift(1)), torch.zeros(4, 2, 6, 6), "RandomShift"),
        (Cutout(2), torch.zeros(4, 6, 6), None),
        (lambda x, _draw: x.flip(-1), torch.zeros(4, 6, 6), None),
        (RandomFlip(), torch.zeros(4, 3, 3), None),
        (RandomFlip(), torch.zeros(4, 6), None),
    ],
)
def test_an_input_is_not_moved_away_from_a_target_that_is_an_image(
    transform: Any, target: torch.Tensor, name: str | None
) -> None:
    """Half of the masks would be of a mirror image, without a word; what covers, and one's own function, is taken."""
    pipeline = InputPipeline(CPU, Fields(), lambda raw: raw, (transform,))
    content = torch.ones(4, 3, 6, 6), target
    if name is None:
        assert pipeline(content, 0, np.arange(4))[1] is target
        return
    with pytest.raises(BadJob, match=rf"{name}\(…\)\]\) moves the pixels of the input \[3, 6, 6\] alone"):
        pipeline(content, 0, np.arange(4))


@pytest.mark.parametrize(
    ("transform", "images", "is_refused"),
    [
        (ColorJitter(0.1), torch.randn(4, 3, 6, 6), True),
        (Sometimes(RandomGrayscale(1.0)), torch.full((4, 3, 6, 6), 200.0), True),
        (ColorJitter(0.1), torch.rand(4, 3, 6, 6), False),
        (ColorJitter(0.1), torch.full((4, 3, 6, 6), 200, dtype=torch.uint8), False),
        (RandomFlip(), torch.randn(4, 3, 6, 6), False),
    ],
)
def test_floating_images_that_are_no_colours_are_not_cut_off(
    transform: Any, images: torch.Tensor, is_refused: bool
) -> None:
    """Standardised images would lose all that is below their mean, without a word."""
    pipeline = InputPipeline(CPU, Fields(), lambda raw: raw, (transform,))
    if is_refused:
        with pytest.raises(BadJob, match="takes floating images to go from 0 to 1 and cuts off what is beyond; these"):
            pipeline((images, torch.zeros(4)), 0, np.arange(4))
    else:
        assert pipeline((images, torch.zeros(4)), 0, np.arange(4))[0].shape == images.shape


def test_an_entry_that_is_input_and_target_is_moved_as_both() -> None:
    """An autoencoder's: there is one image."""
    pipeline = InputPipeline(CPU, Fields(inputs="x", target="x"), lambda raw: raw, (RandomFlip(1.0),))
    image = torch.arange(4.0).view(1, 1, 2, 2)
    assert torch.equal(pipeline({"x": image}, 0, np.arange(1))["x"], image.flip(-1))


def test_images_are_standardised_once() -> None:
    """Normalize is for arrays: a source that prepares its images would take what it gives for bytes."""
    images, labels = torch.arange(48, dtype=torch.uint8).view(4, 3, 2, 2), torch.arange(4)
    pipeline = InputPipeline(CPU, Fields(), lambda raw: raw, (Normalize(0.5, 0.5),))
    assert pipeline((images, labels), 0, np.arange(4))[0].min() == -1
    prepares = replace(pipeline, prepare=lambda raw: (raw[0] / 255, raw[1]))
    with pytest.raises(BadJob, match=r"Normalize.* standardises images, and so do the data"):
        prepares((images, labels), 0, np.arange(4))
    assert replace(prepares, augment=())((images, labels), 0, np.arange(4))[0].max() < 1


def test_preparing_leaves_the_data_as_they_are() -> None:
    """What is in memory is read again in the next epoch."""
    before = IMAGES.clone()
    source = source_of(images_of("memory"), 30, "memory", augment=(RandomShift(2), RandomFlip()))
    contents(source, 0, 2)
    assert torch.equal(IMAGES, before)


def test_evaluation_goes_in_order_and_draws_nothing() -> None:
    """All samples once, the last batch ragged."""
    samples = images_of("memory")
    batches = list(in_order(samples, InputPipeline(CPU, Fields(), samples.prepare), 8))
    assert [batch.size for batch in batches] == [8, 8, 8, 6]
    assert torch.cat([batch.cut(0, batch.size)[1] for batch in batches]).tolist() == list(range(30))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (Failing(10), "^sample 7 of Failing raised OSError: the disk said: BadSample: no$"),
        (Growing(10), r"^samples \d and \d differ in shape: \[3, \d\] and \[3, \d\]; make them equal in the dataset"),
    ],
)
def test_a_sample_that_cannot_be_used_is_a_bad_job(data: Any, problem: str) -> None:
    """In training as in evaluation, in plain words."""
    samples = as_samples(data, what="data")
    with pytest.raises(BadJob, match=problem):
        contents(source_of(samples, 5), 0, 2)
    with pytest.raises(BadJob, match=problem):
        list(in_order(samples, InputPipeline(CPU, Fields(), samples.prepare), 10))


def test_the_draws_of_items_do_not_depend_on_the_batch() -> None:
    """The same sample of the same epoch is the same in batches of 3 and of 7, and of a part of the data."""
    whole = as_samples(Noisy(21), what="data")
    drawn = []
    for batch in (3, 7):
        rows = torch.cat([content["x"] for content in contents(source_of(whole, batch), 0, 21 // batch)])
        drawn.append(rows[rows[:, 0].argsort()])
    assert torch.equal(*drawn)
    part, _ = hold_out(whole, Holdout(0.5))
    rows = torch.cat([content["x"] for content in contents(source_of(part, 4), 0, 3)])
    assert all(row.tolist() in drawn[0].tolist() for row in rows)


def test_an_extent_larger_than_the_data_cannot_be_walked() -> None:
    """Our own bug: sizes that disagree do not loop for ever."""
    source = source_of(as_samples((torch.arange(4),), what="data"), 8, "memory")
    assert source.extent == Extent(4, 8)
    assert [batch.size for batch in source.batches(Position(), 3)] == [4, 4, 4]
