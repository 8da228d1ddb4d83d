"""Datasets of Hugging Face's library as samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import stoker
from stoker.errors import BadJob
from stoker.loading.dataset_adapters import as_samples
from tests.data.files.making import CLASSES, COUNT, huggingface_source, label_of, pixels_of, png_of
from tests.optional import optional

datasets = optional("datasets")


def dataset(**columns: list[Any]) -> Any:
    """A dataset in memory."""
    return datasets.Dataset.from_dict(columns)


def test_images_and_labels_of_a_saved_dataset(tmp_path: Path) -> None:
    """Decoded here, as all images are; labels with the names they have."""
    source = huggingface_source(tmp_path)
    assert (len(source), source.classes, source.target) == (COUNT, CLASSES, "label")
    batch = source.rows(np.array([5, 2]))
    assert torch.equal(batch["image"][0], torch.from_numpy(pixels_of(5).transpose(2, 0, 1)))
    assert batch["label"].tolist() == [label_of(5), label_of(2)]
    assert torch.equal(source.sample(5)["image"], batch["image"][0])
    assert source.prepare(batch)["image"].max() <= 1
    labels = source.labels()
    assert labels is not None
    assert np.bincount(labels).tolist() == [16, 16, 16]


def test_a_dataset_goes_into_a_job_as_it_is() -> None:
    """Numbers float32, whole numbers int64, lists tensors, text text."""
    given = dataset(x=[0.5, 1.5, 2.5], y=[1, 2, 3], v=[[1.0, 2.0]] * 3, words=["a", "b", "c"])
    batch = as_samples(given, what="data").fetch(np.array([2, 0]), 0)
    assert (batch["x"].dtype, batch["x"].tolist(), batch["y"].tolist()) == (torch.float32, [2.5, 0.5], [3, 1])
    assert batch["v"].shape == (2, 2)
    assert batch["words"] == ["c", "a"]


def test_an_empty_list_has_the_numbers_of_its_column() -> None:
    """A text without tokens is no list of floats, which would make floats of all tokens of its batch."""
    tokens = datasets.Features({"ids": datasets.Sequence(datasets.Value("int32")), "y": datasets.Value("int64")})
    given = datasets.Dataset.from_dict({"ids": [[], [3, 4]], "y": [0, 1]}, features=tokens)
    source = stoker.data.huggingface(given)
    assert [source.sample(at)["ids"].dtype for at in range(2)] == [torch.int64, torch.int64]
    batch = as_samples(given, what="data", collate=stoker.lengths.padded(pad=-1)).fetch(np.array([0, 1]), 0)
    assert (batch["ids"].dtype, batch["ids"].tolist()) == (torch.int64, [[-1, -1], [3, 4]])
    words = stoker.data.huggingface(dataset(words=[["a"], []], y=[0, 1]))
    assert words.rows(np.array([1, 0]))["words"] == [[], ["a"]]


@pytest.mark.parametrize("odd", [[[1.0, 2.0], [3.0]], [[1.0, None], [2.0, 3.0]]])
@pytest.mark.parametrize("at", [0, 1])
def test_lists_that_make_no_tensor_are_named(odd: list[list[float | None]], at: int) -> None:
    """Ragged lists and lists with holes, in the first row of a batch or a later one."""
    lists: list[Any] = [[[1.0, 2.0], [3.0, 4.0]]]
    lists.insert(at, odd)
    source = stoker.data.huggingface(dataset(x=lists, y=[0, 1]))
    with pytest.raises(BadJob, match=f"'x' in row {at} of .* makes no tensor"):
        source.rows(np.array([0, 1]))


def test_truth_values_are_whole_numbers() -> None:
    """As labels of two classes, and as inputs, alone and in batches; they are so in lists as well."""
    source = stoker.data.huggingface(dataset(label=[True, False], flag=[False, True], flags=[[True], [False]]))
    batch = source.rows(np.array([0, 1]))
    assert {name: (entry.dtype, entry.tolist()) for name, entry in batch.items()} == {
        "label": (torch.int64, [1, 0]),
        "flag": (torch.int64, [0, 1]),
        "flags": (torch.int64, [[1], [0]]),
    }
    one = as_samples(source, what="data", collate=torch.utils.data.default_collate).fetch(np.array([0]), 0)
    assert (one["label"].dtype, one["flag"].dtype) == (torch.int64, torch.int64)
    assert source.labels().tolist() == [1, 0]


def test_numbers_beyond_int64_and_labels_that_are_missing_are_told() -> None:
    """Neither becomes a negative number."""
    given = datasets.Dataset(pa.table({"v": pa.array([[2**63 + 5]], pa.list_(pa.uint64()))}))
    with pytest.raises(BadJob, match=r"'v' in row 0 of .* has 9223372036854775813, which int64 does not hold"):
        stoker.data.huggingface(given).sample(0)
    labels = stoker.data.huggingface(datasets.Dataset(pa.table({"label": pa.array([1, 2**63], pa.uint64())})))
    for read in (labels.labels, lambda: labels.rows(np.array([0, 1]))):
        with pytest.raises(BadJob, match=r"'label' in row 1 of .* has 9223372036854775808, which int64 does not hold"):
            read()
    with pytest.raises(BadJob, match=r"row 1 of .* has no 'label'"):
        stoker.data.huggingface(dataset(x=[0.0, 1.0], label=[1, None])).labels()


def test_one_by_one_and_by_the_batch_are_the_same() -> None:
    """A collate function of one's own is given what a batch is made of."""
    given = dataset(x=[0.5, 1.5], y=[1, 2])
    items: list[Any] = []
    samples = as_samples(given, what="data", collate=lambda found: items.extend(found) or found)  # type: ignore[func-returns-value]
    samples.fetch(np.array([1]), 0)
    assert items[0]["x"].dtype == torch.float32
    assert float(items[0]["x"]) == 1.5


def test_several_splits_are_a_dict_of_sources() -> None:
    """Under their names."""
    given = datasets.DatasetDict({"train": dataset(x=[1.0], y=[0]), "test": dataset(x=[2.0], y=[1])})
    with pytest.raises(BadJob, match=r"several datasets: 'train', 'test'\nGive one of them"):
        as_samples(given, what="data")
    found = stoker.data.huggingface(given, ["x", "y"])
    assert [*found] == ["train", "test"]
    assert len(found["test"]) == 1


def test_a_transform_of_theirs_is_kept() -> None:
    """Rows come as it makes them, drawn by the keys of the items."""
    given = dataset(x=[1.0, 2.0])
    given.set_transform(lambda rows: {"x": [value + torch.rand(()) for value in rows["x"]]})
    samples = as_samples(given, what="data", seed=3)
    once, again, other = (samples.fetch(np.array([0, 1]), epoch)["x"] for epoch in (0, 0, 1))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_the_fingerprint_is_theirs_and_of_how_it_is_read() -> None:
    """The same content made again has the same."""
    prints = [stoker.data.huggingface(dataset(x=[1.0, value])).fingerprint for value in (2.0, 2.0, 3.0)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (lambda: dataset(x=[1.0]), {"columns": ["xs"]}, "has no column 'xs'. Did you mean 'x'|Known: x"),
        (lambda: dataset(x=[1.0]).to_iterable_dataset(), {}, "a stream of theirs"),
        (lambda: dataset(x=[1.0]).with_format("torch"), {"mean": 0.5, "std": 0.25}, "mean and std would have no"),
        (lambda: [1, 2], {}, "takes a datasets.Dataset; a list is no such dataset"),
    ],
)
def test_what_is_no_such_dataset_is_told(make: Any, given: dict[str, Any], message: str) -> None:
    """A missing column, a stream, something else."""
    with pytest.raises(BadJob, match=message):
        stoker.data.huggingface(make(), **given)


def test_a_value_that_is_missing_or_an_image_that_is_broken_is_told() -> None:
    """With its row."""
    with pytest.raises(BadJob, match=r"row 1 of .* has no 'x'\ndataset\.filter"):
        stoker.data.huggingface(dataset(x=[1.0, None])).sample(1)
    features = datasets.Features({"image": datasets.Image()})
    given = datasets.Dataset.from_dict({"image": [{"bytes": png_of(1)[:50], "path": None}]}, features=features)
    with pytest.raises(BadJob, match=r"the image 'image' in row 0 of .* cannot be read"):
        stoker.data.huggingface(given).sample(0)
