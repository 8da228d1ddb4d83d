"""What a job's data hold, as an exported model takes it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.artifacts.dtypes import Arrays
from stoker.errors import BadArtifact
from stoker.exporting import JobInputs, job_inputs, varying
from stoker.exporting.export import _labels, _varying, with_missing
from stoker.loading.dataset_adapters import as_samples


class Two(nn.Module):
    """Takes two inputs."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right


def job(data: object, **changes: object) -> stoker.Job:
    """A job on these data."""
    settings = {
        "model": Two,
        "data": data,
        "loss": "mse",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 2,
        "until": stoker.epochs(1),
    }
    return stoker.Job(**(settings | changes))


A, B, Y = torch.arange(6.0).view(3, 2), torch.ones(3, 2), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("data", "changes", "names"),
    [
        ((A, B, Y), {"fields": stoker.Fields(inputs=[0, 1])}, ("left", "right")),
        ((Y, B, A), {"fields": stoker.Fields(inputs=[2, 1], target=0)}, ("left", "right")),
        ({"left": A, "right": B, "label": Y}, {}, ("left", "right")),
        ({"right": B, "left": A, "y": Y}, {}, ("right", "left")),
        (
            {"left": A, "more": Y, "right": B, "y": Y},
            {"fields": stoker.Fields(inputs=["left", "right"])},
            ("left", "right"),
        ),
    ],
)
def test_inputs_are_found_where_the_job_says_they_lie(data: object, changes: dict, names: tuple[str, ...]) -> None:
    """In tuples and dicts, in any order; the model is called with them as in training."""
    samples = as_samples(data, what="data")
    found = job_inputs(job(data, **changes), Two(), samples)
    assert found.names == names
    arrays = found.arrays([2, 0])
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "left": A[[2, 0]].tolist(),
        "right": B[[2, 0]].tolist(),
    }
    output = found.call(Two(), *(torch.from_numpy(arrays[name]) for name in names))
    assert output.tolist() == (A - B)[[2, 0]].tolist()


def test_a_source_names_its_entries_and_its_preparation_is_part_of_the_call() -> None:
    """Bytes go in; `prepared` is for models that take floats."""
    data = stoker.data.digits()[0]
    found = job_inputs(job(data, model=nn.Identity), nn.Identity(), as_samples(data, what="data"))
    raw = found.arrays([0, 5])["image"]
    assert (found.names, raw.dtype, raw.shape) == (("image",), np.uint8, (2, 1, 8, 8))
    wanted = torch.stack([data[0][0], data[5][0]])
    torch.testing.assert_close(found.call(nn.Identity(), torch.from_numpy(raw)), wanted)
    assert found.has_preparation
    np.testing.assert_array_equal(found.prepared().arrays([0, 5])["image"], wanted.numpy())


def test_an_input_that_is_no_tensor_is_told() -> None:
    """Strings cannot be traced."""

    class Texts:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[str, int]:
            return "text", index

    with pytest.raises(BadArtifact, match="input 0 is a "):
        job_inputs(job(Texts()), Two(), as_samples(Texts(), what="data"))


def test_dimensions_that_differ_between_batches_are_named_together() -> None:
    """Equal sizes share a name; whole numbers in rows are tokens; the batch is none of them."""
    ids, image = np.zeros((2, 5), np.int64), np.zeros((2, 3, 7, 5), np.float32)
    again = {
        "ids": np.zeros((3, 9), np.int64),
        "mask": np.zeros((3, 9), np.int64),
        "image": np.zeros((3, 3, 8, 6), np.float32),
    }
    assert varying([{"ids": ids, "mask": ids, "image": image}, again]) == {
        "ids": {1: "tokens"},
        "mask": {1: "tokens"},
        "image": {2: "image_2", 3: "image_3"},
    }


@pytest.mark.parametrize(("lengths", "expected"), [([9, 9, 9, 2, 9, 9, 9, 9], {"input": {1: "tokens"}}), ([9] * 8, {})])
def test_samples_of_which_most_have_the_largest_size_vary(lengths: list[int], expected: dict) -> None:
    """Truncated texts are mostly equally long, and so are batches of them; one shorter text is enough."""
    texts = [(torch.ones(length, dtype=torch.long), 0) for length in lengths]

    def collated(items: list) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.utils.rnn.pad_sequence([text for text, _ in items], batch_first=True), torch.zeros(len(items))

    own, model = job(texts, fields=stoker.Fields(collate=collated)), nn.Embedding(2, 3)
    assert _varying(job_inputs(own, model, as_samples(texts, what="data", collate=collated))) == expected


class Named(torch.utils.data.Dataset):
    """Samples of two classes, as torchvision's data sets have them."""

    def __init__(self, classes: object) -> None:
        self.classes, self.target_transform = classes, None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(2), 1 - index % 2 if self.target_transform else index % 2


@pytest.mark.parametrize(
    ("classes", "is_changed", "labels"),
    [
        (["cat", "dog"], False, ("cat", "dog")),
        ([("cat", "house cat"), ("dog",)], False, ("cat, house cat", "dog")),
        (["cat", "dog"], True, ()),
        (None, False, ()),
    ],
    ids=["names", "several names", "target_transform", "none"],
)
def test_an_output_has_the_names_of_the_numbers_that_were_learned(
    classes: object, is_changed: bool, labels: tuple[str, ...]
) -> None:
    """A data set that changes its targets keeps the names of what it stores: a service would name the wrong class."""
    data = Named(classes)
    data.target_transform = (lambda target: 1 - target) if is_changed else None
    given = job(data, model=lambda: nn.Linear(2, 2), loss="cross_entropy")
    inputs = job_inputs(given, nn.Linear(2, 2), as_samples(data, what="data"))
    assert _labels(given, nn.Linear(2, 2), inputs) == ({"output": labels} if labels else {})


class Fills(nn.Module):
    """Takes NaN for 0, or passes it on."""

    def __init__(self, *, fills: bool) -> None:
        super().__init__()
        self.fills = fills

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(x) if self.fills else x


@pytest.mark.parametrize(("fills", "missing", "first"), [(True, 137, 137), (False, 137, 0), (True, None, 0)])
def test_a_sample_with_nan_is_the_first_example_of_a_model_that_takes_it(
    fills: bool, missing: int | None, first: int
) -> None:
    """A service knows by the golden inputs that NaN is taken; where it makes an answer NaN it is not."""
    values = torch.arange(600.0).view(300, 2)
    if missing is not None:
        values[missing, 1] = torch.nan
    samples = as_samples((values, torch.zeros(300, dtype=torch.long)), what="data")
    module = Fills(fills=fills)
    rows = with_missing(job_inputs(job(samples), module, samples), module, [0, 100, 200, 299])
    assert rows == ([first, 0, 100, 200, 299] if first else [0, 100, 200, 299])


def test_few_samples_are_copied_at_once_to_look_for_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large samples, such as images of floats, fill the memory otherwise."""
    samples = as_samples((torch.ones(3000, 2), torch.zeros(3000, dtype=torch.long)), what="data")
    module, whole, counts = Fills(fills=True), JobInputs.arrays, list[int]()

    def arrays(inputs: JobInputs, rows: Sequence[int]) -> Arrays:
        counts.append(len(rows))
        return whole(inputs, rows)

    monkeypatch.setattr(JobInputs, "arrays", arrays)
    assert with_missing(job_inputs(job(samples), module, samples), module, [0, 2999]) == [0, 2999]
    assert sum(counts) == 3002
    assert max(counts) <= 64


def test_examples_of_whole_numbers_stay_as_they_are() -> None:
    """Such as images as bytes, in which nothing is missing."""
    samples = as_samples((torch.arange(600).view(300, 2), torch.zeros(300, dtype=torch.long)), what="data")
    module = Fills(fills=True)
    assert with_missing(job_inputs(job(samples), module, samples), module, [0, 299]) == [0, 299]
