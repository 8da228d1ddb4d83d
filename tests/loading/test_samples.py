from __future__ import annotations

import errno
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.jobs import Holdout
from stoker.loading import samples
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.samples import BadSample, ItemSamples, hold_out, reads_repeated
from tests.loading.data import Failing, Growing, Noisy, Squares

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)
ROWS = np.array([7, 0, 7, 3])


class Labelled(Squares):
    """Samples as dicts of words and numbers."""

    def __getitem__(self, index: int) -> Any:
        return {"word": "x" * index, "label": index}


class Changed(torch.utils.data.TensorDataset):
    """Tensors whose items are not their rows."""

    def __getitem__(self, index):
        return tuple(tensor[index] * 2 for tensor in self.tensors)


class Picture:
    """Something with bytes to show, as PIL's images have."""

    size = (2, 2)

    def __init__(self, content: bytes) -> None:
        self.content = content

    def tobytes(self) -> bytes:
        return self.content


class Stream(torch.utils.data.IterableDataset):
    """Samples one after the other."""

    def __iter__(self):
        return iter(())


class Source:
    """A lazy source, as `stoker.data` has them."""

    name, fingerprint = "source/train", "sha256:stated"

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 10

    def arrays(self):
        self.reads += 1
        return X, Y

    def prepare(self, batch):
        return batch[0] / 2, batch[1]


def padded(items: list[Any]) -> Any:
    """A collate function of a user's own."""
    longest = max(len(item["word"]) for item in items)
    return {"length": torch.tensor([longest] * len(items)), "label": torch.tensor([item["label"] for item in items])}


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        (X, list(range(10))),
        {0: X, 1: Y.numpy()},
        torch.utils.data.TensorDataset(X, Y),
        list(zip(X, Y, strict=True)),
        Source(),
    ],
    ids=["tensors", "numpy", "list", "dict", "TensorDataset", "list of samples", "source"],
)
def test_data_of_every_kind_give_their_rows(data: Any) -> None:
    """Indices of a batch may repeat and need no order; entry 1 is the label."""
    found = as_samples(data, what="data")
    batch = found.fetch(ROWS, epoch=0)
    assert len(found) == 10
    assert torch.equal(torch.as_tensor(batch[0]), X[ROWS])
    assert torch.equal(torch.as_tensor(batch[1]), Y[ROWS])


def test_dict_samples_and_a_collate_function_of_ones_own() -> None:
    """Items need not stack if the job says how a batch is made of them."""
    found = as_samples(Labelled(10), what="data", collate=padded)
    assert found.fetch(ROWS, 0)["length"].tolist() == [7] * 4
    assert found.fetch(ROWS, 0)["label"].tolist() == [7, 0, 7, 3]
    plain = as_samples(Labelled(10), what="data").fetch(ROWS, 0)
    assert plain["word"] == ["x" * 7, "", "x" * 7, "xxx"]


def test_a_data_set_that_changes_its_tensors_is_asked_for_items() -> None:
    """A subclass of TensorDataset is not bypassed, and neither is a collate function."""
    assert torch.equal(as_samples(Changed(X, Y), what="data").fetch(ROWS, 0)[0], X[ROWS] * 2)
    tensors = torch.utils.data.TensorDataset(X, Y)
    assert as_samples(tensors, what="data", collate=len).fetch(ROWS, 0) == 4


def test_a_source_is_read_when_it_is_needed_and_once() -> None:
    """Its length and fingerprint cost nothing; what it prepares is left to the device."""
    source = Source()
    found = as_samples(source, what="data")
    assert (len(found), found.fingerprint(), found.name, source.reads) == (10, "sha256:stated", "source/train", 0)
    raw = found.fetch(ROWS, 0)
    found.fetch(ROWS, 1)
    assert source.reads == 1
    assert torch.equal(found.prepare(raw)[0], X[ROWS] / 2)


@pytest.mark.parametrize(
    "array",
    [X.numpy()[::-1], X.numpy()[:, ::-1], X.numpy().astype(">f4"), np.asfortranarray(X.numpy()), X.numpy().T.copy().T],
)
def test_numpy_arrays_in_any_layout_are_taken(array: np.ndarray) -> None:
    """Reversed, transposed or of the other endianness: their values count."""
    assert as_samples(array, what="data").fetch(ROWS, 0)[0].tolist() == array[ROWS].tolist()


def test_a_read_only_array_is_taken_without_a_word(tmp_path) -> None:
    """A file mapped into memory is data like any other."""
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert torch.equal(as_samples((mapped, Y), what="data").fetch(ROWS, 0)[0], X[ROWS])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ((X, Y[:9]), "the arrays of data have different numbers of samples (0: 10, 1: 9)"),
        ({"x": X, "y": Y[:1]}, "different numbers of samples (x: 10, y: 1)"),
        ((X[:0], Y[:0]), "data has no samples"),
        (torch.tensor(3.0), "data has no samples"),
        ([], "data has no samples"),
        ((), "data has no samples"),
        ({}, "data has no samples"),
        (Squares(0), "data has no samples"),
        (Stream(), "data is an IterableDataset, which has no samples by number"),
        (None, "data is a NoneType, wanted arrays, a map-style dataset or one of stoker.data"),
        ("train.csv", "data is a str, wanted arrays"),
        (object(), "data is a object, wanted arrays"),
        ([X, X], "data is a list of 2 arrays: it could be their samples or their entries"),
        (np.array(["a", "b"]), "data[0] cannot be a tensor"),
        ((X, np.array([object()] * 10)), "data[1] cannot be a tensor"),
        ({"x": X, "words": ["a"] * 10}, "data['words'] cannot be a tensor"),
    ],
)
def test_data_that_cannot_be_used_are_refused(data: Any, problem: str) -> None:
    """What is wrong with which part, with the numbers."""
    with pytest.raises(BadJob, match=re.escape(problem)):
        as_samples(data, what="data")


def test_a_sample_that_cannot_be_fetched_is_named() -> None:
    """By its index in the data and the data's name, with the reason; when it is fetched, or looked at beforehand."""
    found = as_samples(Failing(10), what="data")
    with pytest.raises(BadJob, match=r"^sample 7 of Failing raised OSError: the disk said"):
        found.fetch(ROWS, 0)
    with pytest.raises(BadJob, match=r"^sample 7 of Failing raised OSError"):
        found.fingerprint()


def test_samples_of_different_shapes_are_named() -> None:
    """Two indices and their shapes, and what can be done."""
    with pytest.raises(BadJob, match=r"samples 2 and 5 differ in shape: \[3, 2\] and \[3, 4\]; make them equal"):
        as_samples(Growing(10), what="data").fetch(np.array([2, 3, 5]), 0)


def test_an_error_of_the_users_own_collate_function_is_theirs() -> None:
    """Its reason is reported, not guessed from the shapes."""
    found = as_samples(Growing(10), what="data", collate=lambda items: items[100])
    with pytest.raises(BadJob, match="collating 3 samples of Growing raised IndexError: list index out of range"):
        found.fetch(np.array([2, 3, 5]), 0)


def test_random_draws_are_keyed_by_epoch_and_index() -> None:
    """A sample has the same draws wherever it stands in a batch, and others in another epoch or under another seed."""
    found = as_samples(Noisy(10), what="data", seed=1)
    one, two = (found.fetch(np.array(rows), 0)["x"] for rows in ([3, 8], [8, 1, 3]))
    assert torch.equal(one[0], two[2])
    assert torch.equal(one[1], two[0])
    others = [found.fetch(np.array([3]), 1), as_samples(Noisy(10), what="data", seed=2).fetch(np.array([3]), 0)]
    drawn = torch.stack([one[0], *(other["x"][0] for other in others)])[:, 1:]
    assert len(set(drawn.flatten().tolist())) == 9


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X, Y), (X, Y.flip(0))),
        ((X, Y), (Y, X)),
        ((X, Y), {"x": X, "y": Y}),
        ({"x": X}, {"z": X}),
        ((X, Y), (X.double(), Y)),
        ((X, Y), (X[:9], Y[:9])),
        ((X,), (X.view(10, 1, 2),)),
        (Squares(10), Squares(11)),
        (Squares(10), Noisy(10)),
        (Noisy(10), Labelled(10)),
        ([(Picture(b"a"), 1)], [(Picture(b"b"), 1)]),
        ([(np.arange(2), 1)], [(np.arange(2) + 1, 1)]),
        ([(None, 1)], [(0, 1)]),
        ([("1", 1)], [(1, 1)]),
    ],
)
def test_other_data_have_another_fingerprint(one: Any, other: Any) -> None:
    """Content, names, types, shapes, length and kind count; the same data have the same one."""
    found = [as_samples(data, what="data").fingerprint() for data in (one, other, one)]
    assert found[0] == found[2] != found[1]


@given(st.integers(2, 400), st.floats(0.01, 0.99), st.integers(0, 5))
def test_a_holdout_divides_the_data(size: int, fraction: float, seed: int) -> None:
    """Both parts are disjoint and complete, in their original order, of the size asked for, and always the same."""
    whole = as_samples((torch.arange(size),), what="data")
    aside = round(size * fraction)
    if not 0 < aside < size:
        with pytest.raises(BadJob, match=f"sets {aside} of {size} samples aside"):
            hold_out(whole, Holdout(fraction, seed=seed))
        return
    parts = hold_out(whole, Holdout(fraction, seed=seed))
    rest, held = (part.fetch(np.arange(len(part)), 0)[0].tolist() for part in parts)
    assert len(held) == aside
    assert sorted(rest + held) == list(range(size))
    assert rest == sorted(rest)
    assert held == sorted(held)
    again = hold_out(as_samples((torch.arange(size),), what="data"), Holdout(fraction, seed=seed))
    assert again[1].fetch(np.arange(aside), 0)[0].tolist() == held


def test_another_seed_holds_out_others() -> None:
    """And the fingerprints say so, of both parts."""
    whole = as_samples((X, Y), what="data")
    ways = [hold_out(whole, Holdout(0.3, seed=seed)) for seed in range(4)]
    assert len({tuple(held.fetch(np.arange(3), 0)[1].tolist()) for _, held in ways}) > 1
    assert len({part.fingerprint() for way in ways for part in way}) == 8


def test_labels_stay_with_their_samples() -> None:
    """In a part as in the whole, item by item and all at once."""
    whole = as_samples((X, Y), what="data")
    for part in hold_out(whole, Holdout(0.4)):
        inputs, labels = part.fetch(np.arange(len(part)), 0)
        assert torch.equal(inputs[:, 0], labels * 2.0)
        assert torch.equal(part.all_of(1), labels)
    assert whole.all_of(1) is not None
    assert as_samples(Squares(3), what="data").all_of(1) is None


def test_a_part_of_a_data_set_draws_as_the_whole_does() -> None:
    """A sample's random draws belong to its index in the data, not in the part."""
    whole = as_samples(Noisy(20), what="data")
    part, _ = hold_out(whole, Holdout(0.5))
    assert isinstance(part, samples.SampleSubset)
    rows = np.arange(len(part))
    assert torch.equal(part.fetch(rows, 2)["x"], whole.fetch(part.indices, 2)["x"])
    assert (part.is_in_memory, part.data_class) == (False, "indexed")


class OnNetwork:
    """Sixteen numbers drawn at random, on a disk whose server is away at first, for so many reads."""

    def __init__(self, error: Exception, failures: int) -> None:
        self.error, self.failures = error, failures

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand(())
        if index == 5 and self.failures:
            self.failures -= 1
            raise self.error
        return drawn + index


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "gone"), OSError(errno.ESTALE, "gone"), TimeoutError("late"), ConnectionResetError("reset")],
    ids=["EIO", "ESTALE", "timeout", "reset"],
)
def test_a_read_that_failed_for_a_network_is_repeated(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A few times, ever later; what it draws is the same as if nothing had been."""
    pauses: list[float] = []
    monkeypatch.setattr(samples.time, "sleep", pauses.append)
    expected = ItemSamples(OnNetwork(error, 0), None, seed=3).fetch(np.arange(16), 0)
    before = reads_repeated()[0]
    assert torch.equal(ItemSamples(OnNetwork(error, 3), None, seed=3).fetch(np.arange(16), 0), expected)
    assert pauses == list(samples.PAUSES_S)
    assert reads_repeated()[0] - before == 3
    with pytest.raises(BadSample, match="sample 5 of OnNetwork raised"):
        ItemSamples(OnNetwork(error, 4), None, seed=3).fetch(np.arange(16), 0)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "no"), PermissionError(errno.EACCES, "no"), ValueError("x")]
)
def test_other_errors_are_told_at_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A file that is missing stays missing."""
    monkeypatch.setattr(samples.time, "sleep", None)
    with pytest.raises(BadSample, match="sample 5 of OnNetwork raised"):
        ItemSamples(OnNetwork(error, 1), None, seed=3).fetch(np.arange(16), 0)
