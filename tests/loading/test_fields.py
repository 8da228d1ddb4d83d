from __future__ import annotations

import re
from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.jobs.fields import Fields
from stoker.loading.fields import can_be_cut, cut, map_tensors, take, tensors_of
from stoker.loading.samples import ItemSamples

X, Y, MASK = torch.arange(12.0).view(4, 3), torch.arange(4), torch.ones(4, 2)
Pair = namedtuple("Pair", ["image", "label"])  # noqa: PYI024 - what torch's collate makes of one


def seen(*arguments: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model that returns what it is called with."""
    return arguments, named


def is_equal(one: Any, other: Any) -> bool:
    """Whether two batches are equal, container by container."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return type(other) is dict and list(one) == list(other) and all(is_equal(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_equal, one, other))
    return one == other


@pytest.mark.parametrize(
    ("fields", "content", "called", "target"),
    [
        (Fields(), (X, Y), ((X,), {}), Y),
        (Fields(), [X, MASK, Y], ((X,), {}), Y),
        (Fields(), (X,), ((X,), {}), None),
        (Fields(), X, ((X,), {}), None),
        (Fields(), Pair(X, Y), ((X,), {}), Y),
        (Fields(inputs=[0, 1]), (X, MASK, Y), ((X, MASK), {}), Y),
        (Fields(inputs=1, target=0), (Y, X), ((X,), {}), Y),
        (Fields(), {"image": X, "label": Y}, ((X,), {}), Y),
        (Fields(), {"y": Y, "x": X}, ((X,), {}), Y),
        (Fields(), {"ids": X, "mask": MASK, "labels": Y}, ((), {"ids": X, "mask": MASK}), Y),
        (Fields(inputs="ids"), {"ids": X, "mask": MASK, "labels": Y}, ((X,), {}), Y),
        (
            Fields(inputs=["mask", "ids"], target="labels"),
            {"ids": X, "mask": MASK, "labels": Y},
            ((), {"mask": MASK, "ids": X}),
            Y,
        ),
        (Fields(target="mask"), {"ids": X, "mask": MASK}, ((X,), {}), MASK),
        (Fields(), {"ids": X}, ((X,), {}), None),
        (Fields(), UserDict(ids=X, label=Y), ((X,), {}), Y),
        (Fields(inputs=0, target=1), {0: X, 1: Y}, ((X,), {}), Y),
    ],
)
def test_inputs_and_target_are_found(fields: Fields, content: Any, called: Any, target: Any) -> None:
    """One input goes by position, several by position (tuple) or by name (dict); the target is the usual entry."""
    assert is_equal(fields.call(seen, content), called)
    assert is_equal(fields.target_of(content), target)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"inputs": []}, r"Fields\(inputs=…\): wanted a key or an index of an entry, or several, got \[\]"),
        ({"inputs": 1.5}, "got 1.5"),
        ({"target": ["y"]}, r"Fields\(target=…\): wanted a key or an index of an entry, got \['y'\]"),
        ({"collate": "pad"}, r"Fields\(collate=…\): wanted a function of samples, got a str"),
    ],
)
def test_what_names_no_entry_is_refused(given: dict[str, Any], problem: str) -> None:
    """Where it is written, with its value."""
    with pytest.raises(BadJob, match=problem):
        Fields(**given)


@pytest.mark.parametrize(
    ("fields", "content", "problem"),
    [
        (Fields(inputs="imgae"), {"image": X, "label": Y}, "no entry 'imgae'. Did you mean 'image'?"),
        (Fields(target="labl"), {"image": X, "label": Y}, "no entry 'labl'. Did you mean 'label'?"),
        (Fields(inputs=2), (X, Y), "samples have entries 0 to 1, there is no 2"),
        (Fields(target=-1), (X, Y), "samples have entries 0 to 1, there is no -1"),
        (Fields(inputs="image"), (X, Y), "samples have entries 0 to 1, there is no 'image'"),
        (Fields(), {"label": Y}, "samples have no entry for the model: all they have is 'label'"),
    ],
)
def test_an_entry_that_is_not_there_is_named(fields: Fields, content: Any, problem: str) -> None:
    """With the nearest name, or the places there are."""
    ask = fields.target_of if fields.target is not None else lambda content: fields.call(seen, content)
    with pytest.raises(BadJob, match=re.escape(problem)):
        ask(content)


def test_augmenting_samples_without_an_input_is_a_bad_job() -> None:
    """Not a StopIteration, which would end a generator in silence."""
    with pytest.raises(BadJob, match="no entry for the model"):
        Fields().map_inputs({"label": Y}, id)


@pytest.mark.parametrize("content", [(X, Y), [X, Y], Pair(X, Y), {"image": X, "label": Y}, X])
def test_a_transform_changes_the_first_input_alone(content: Any) -> None:
    """Whatever holds the batch stays what it is, names included."""
    changed = Fields().map_inputs(content, lambda x: x + 1)
    assert type(changed) is type(content)
    assert is_equal(Fields().call(seen, changed)[0], (X + 1,))
    assert is_equal(Fields().target_of(changed), Fields().target_of(content))


def test_mapping_reaches_every_tensor_and_nothing_else() -> None:
    """Nested containers keep their kind; words stay."""
    content = {"a": [X, ("word", Y)], "b": Pair(X, 3)}
    changed = map_tensors(content, lambda tensor: tensor * 2)
    assert is_equal(changed, {"a": [X * 2, ("word", Y * 2)], "b": Pair(X * 2, 3)})
    assert is_equal(tensors_of(content), [X, Y, X])


SHAPES = st.sampled_from(["tuple", "list", "dict", "nested", "named", "tensor"])


def batch_of(shape: str, size: int) -> Any:
    """A batch of `size` samples, as collate functions make them."""
    x, y = torch.arange(size * 2).view(size, 2), torch.arange(size)
    return {
        "tuple": (x, y),
        "list": [x, y],
        "dict": {"x": x, "y": y},
        "named": Pair(x, y),
        "tensor": x,
        "nested": [{"ids": x, "mask": [x, x]}, y],
    }[shape]


@given(SHAPES, st.integers(1, 6), st.data())
def test_a_batch_cut_and_joined_is_the_batch(shape: str, size: int, data: st.DataObject) -> None:
    """Every tensor is cut along its samples, whatever number of entries happens to be in the batch."""
    content = batch_of(shape, size)
    at = data.draw(st.integers(0, size))
    parts = [cut(content, 0, at, size), cut(content, at, size, size)]
    leaves = [[], []]
    for found, part in zip(leaves, parts, strict=True):
        map_tensors(part, found.append)
    whole = []
    map_tensors(content, whole.append)
    assert [torch.equal(torch.cat(pair), both) for *pair, both in zip(*leaves, whole, strict=True)] == [True] * len(
        whole
    )
    assert is_equal(cut(content, 0, size, size), content)
    assert can_be_cut(content, size)


@given(st.integers(1, 6), st.data())
def test_lists_with_one_item_a_sample_are_cut(size: int, data: st.DataObject) -> None:
    """Words, images of different sizes (one as long as the batch), boxes: what a collate function leaves uncollated."""
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    words = [f"word {i}" for i in range(size)]
    pictures = [torch.zeros(size - 1 + i, 3) for i in range(size)]
    boxes = [{"boxes": torch.zeros(size - 1 + i, 4), "name": "a"} for i in range(size)]
    content = (words, pictures, boxes)
    assert can_be_cut(content, size)
    assert is_equal(cut(content, start, stop, size), (words[start:stop], pictures[start:stop], boxes[start:stop]))
    samples = list(zip(words, pictures, strict=True))
    assert is_equal(cut(samples, start, stop, size), samples[start:stop])
    zipped = tuple(zip(*samples, strict=True))
    assert is_equal(cut(zipped, start, stop, size), tuple(entry[start:stop] for entry in zipped))


def detection(items: list[Any]) -> Any:
    """Stacked images, and a list of dicts."""
    return torch.stack([image for image, _ in items]), [boxes for _, boxes in items]


def zipped(items: list[Any]) -> Any:
    """A tuple of images and one of boxes, as the reference training of torchvision has them."""
    return tuple(zip(*items, strict=True))


def listed(items: list[Any]) -> Any:
    """A list of images and one of boxes, in a list."""
    return [list(entry) for entry in zip(*items, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("collate", [detection, zipped, listed, list])
def test_samples_with_as_many_rows_as_the_batch_has_samples_are_cut_by_sample(collate: Any, size: int) -> None:
    """Each image has as many channels and boxes as the batch has images: which list is by sample, more of them show."""
    samples = [(torch.full((size, 4, 4), i), {"boxes": torch.full((size, 4), float(i))}) for i in range(size)]
    fetched = ItemSamples(samples, collate, 0).fetch(np.arange(size), 0)
    for row in range(size):
        assert is_equal(cut(map_tensors(fetched, torch.clone), row, row + 1, size), collate(samples[row : row + 1]))
    if size > 1:
        assert is_equal(take(fetched, [1, 0], size), collate([samples[1], samples[0]]))


def test_a_collate_function_that_changes_its_items_is_taken_as_it_is() -> None:
    """It takes entries out of them and writes into their tensors: neither fails, and nothing is written twice."""

    class Fresh:
        """Two samples of two boxes each; each read makes them again."""

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return {"image": torch.full((3,), float(index)), "more": {"boxes": torch.zeros(2, 4)}}

    def numbered(items: list[Any]) -> Any:
        boxes = [item["more"].pop("boxes") for item in items]
        for index, of_sample in enumerate(boxes):
            of_sample[:, 0] = index
        return torch.stack([item.pop("image") for item in items]), boxes

    def refuses_more(items: list[Any]) -> Any:
        assert len(items) <= 2
        return numbered(items)

    images, boxes = ItemSamples(Fresh(), numbered, 0).fetch(np.arange(2), 0)
    assert [int(of_sample[0, 0]) for of_sample in boxes] == [0, 1]
    assert is_equal(cut((images, boxes), 1, 2, 2), (images[1:], boxes[1:]))
    images, boxes = ItemSamples(Fresh(), refuses_more, 0).fetch(np.arange(2), 0)
    assert len(images) == len(boxes) == 2


def test_an_entry_for_each_of_as_many_inputs_as_samples_is_cut_by_its_rows() -> None:
    """Two views [B, 3] of two samples are no list of samples."""
    samples = [(torch.full((3,), i), torch.full((3,), 10 + i)) for i in range(2)]

    def views(items: list[Any]) -> Any:
        return {"views": [torch.stack(view) for view in zip(*items, strict=True)]}

    fetched = ItemSamples(samples, views, 0).fetch(np.arange(2), 0)
    for row in range(2):
        assert is_equal(cut(fetched, row, row + 1, 2), views(samples[row : row + 1]))


def test_what_all_samples_share_stays_whole() -> None:
    """A mask over positions, or a number, goes with every micro-batch."""
    content = {"x": X, "positions": torch.eye(3), "temperature": 0.5, "scale": torch.tensor(2.0)}
    assert is_equal(cut(content, 1, 2, 4), {**content, "x": X[1:2]})


@pytest.mark.parametrize(
    "content", [torch.zeros(5, 2), {"packed": torch.zeros(9)}, (torch.tensor(1.0), "word"), "word"]
)
def test_a_batch_without_rows_cannot_be_cut(content: Any) -> None:
    """Packed samples, for instance: cutting would give every micro-batch all of them."""
    assert not can_be_cut(content, 4)


def test_other_mappings_become_dicts_when_cut() -> None:
    """So that a model gets the same type from a whole batch and from a part."""
    whole = UserDict(x=X, y=Y)
    assert type(cut(whole, 0, 4, 4)) is type(cut(whole, 0, 2, 4)) is dict


def test_entries_of_a_named_tuple_have_names() -> None:
    """They go by place and by name; an error names those that there are."""
    pair = Pair(X, Y)
    fields = Fields(inputs=["image"], target="label")
    assert fields.call(seen, pair)[0][0] is X
    assert fields.target_of(pair) is Y
    with pytest.raises(BadJob, match="entries 0 to 1, called image, label, there is no 'picture'"):
        Fields(inputs="picture").call(seen, pair)
