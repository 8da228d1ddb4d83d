from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stoker import data
from stoker.errors import BadJob
from stoker.jobs.fields import Fields
from stoker.jobs.run_length import Extent
from stoker.loading.batches import BatchSource, InputPipeline
from stoker.loading.dataset_adapters import as_samples
from stoker.records import Plan, Position
from stoker.testing import FaultyDisk
from tests.data.packing import PROBES, Lines, Pictures, Random, packed

ROOT = Path(__file__).resolve().parents[2]
SIZE = 23


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> data.PackedSource:
    """Twenty-three pictures in five files."""
    source = packed(Pictures(), tmp_path_factory.mktemp("packed") / "pictures")
    assert source.rows(np.arange(1)) is not None
    return source


def files(folder: Path) -> list[str]:
    """What is in a folder but for the lock."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != "lock")


@given(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=40))
def test_a_batch_is_what_the_dataset_gives(pictures: data.PackedSource, indices: list[int]) -> None:
    """In any order, samples several times as well; types and shapes as PyTorch's collate function would make them."""
    images, labels = pictures.rows(np.array(indices, dtype=np.int64))
    expected = torch.utils.data.default_collate([Pictures()[index] for index in indices])
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])
    assert (images.dtype, labels.dtype) == (expected[0].dtype, expected[1].dtype)


def test_attributes_of_anybodys_data_set_are_not_taken_for_what_they_are_here(tmp_path: Path) -> None:
    """`target` is the label's place, and `classes` are names: not all labels, and not nothing."""
    dataset = Pictures()
    vars(dataset).update(target=torch.arange(SIZE), classes=None)
    source = packed(dataset, tmp_path / "p")
    assert (source.target, source.classes) == (None, ())
    assert as_samples(source, what="data").all_of(-1).tolist() == [Pictures()[at][1] for at in range(SIZE)]


def test_samples_one_by_one_are_the_datasets(pictures: data.PackedSource) -> None:
    """By number, from the end as well, and beyond it none."""
    for index in (0, 7, -1):
        image, label = pictures[index]
        assert torch.equal(image, torch.from_numpy(Pictures()[index % SIZE][0]))
        assert int(label) == index % SIZE
    with pytest.raises(IndexError, match="has 23 samples, there is no sample 23"):
        pictures[23]


def test_every_sample_is_read_once_and_then_none(tmp_path: Path) -> None:
    """Except the few that identify what is packed: the next process that opens it decodes nothing else."""
    first, later = Pictures(), Pictures()
    packed(first, tmp_path / "p").rows(np.arange(SIZE))
    assert sorted(first.read[PROBES:]) == list(range(SIZE))
    assert packed(later, tmp_path / "p").rows(np.arange(SIZE)) is not None
    assert len(later.read) == PROBES
    assert files(tmp_path / "p") == ["manifest.json", *(f"shard-{number:06d}.bin" for number in range(5))]


def test_a_relative_folder_is_of_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing begins later, and perhaps from elsewhere: else all would be packed a second time."""
    monkeypatch.chdir(tmp_path)
    assert data.packed(Pictures(), "p").folder == tmp_path / "p"


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    """Not when it is made, nor for its length; the estimate reads a few, and packs nothing."""
    pictures = Pictures()
    source = packed(pictures, tmp_path / "p")
    assert (len(source), pictures.read) == (SIZE, [])
    assert source.estimated_bytes == SIZE * (147 + 8)
    assert len(pictures.read) == PROBES
    assert not (tmp_path / "p").exists()


def test_samples_of_different_shapes_are_given_one_by_one(tmp_path: Path) -> None:
    """Bit for bit, in dicts as they came."""
    source = packed(Lines(), tmp_path / "p", shard_bytes=60)
    assert source.rows(np.arange(3)) is None
    for index in range(12):
        found, expected = source.sample(index), Lines()[index]
        assert torch.equal(found["numbers"], torch.from_numpy(expected["numbers"]))
        assert int(found["label"]) == expected["label"]


@pytest.mark.slow
@pytest.mark.parametrize("deadly", [4, 22])
def test_a_killed_process_loses_one_file_at_most(tmp_path: Path, deadly: int) -> None:
    """SIGKILL while a sample is read: nothing counts as packed; the next one reads only what is missing."""
    program = f"from tests.data import packing; packing.pack_and_die({str(tmp_path / 'p')!r}, {deadly})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "manifest.json" not in files(tmp_path / "p")
    pictures = Pictures()
    images, labels = packed(pictures, tmp_path / "p").rows(np.arange(SIZE))
    assert pictures.read[PROBES:] == list(range(deadly // 5 * 5, SIZE))
    assert torch.equal(images[:, 0, 0, 0], torch.arange(SIZE, dtype=torch.uint8))
    assert torch.equal(labels, torch.arange(SIZE))
    fresh = packed(Pictures(), tmp_path / "fresh")
    assert fresh.fingerprint == packed(Pictures(), tmp_path / "p").fingerprint


@pytest.mark.parametrize(
    ("changed", "version"),
    [(Pictures(offset=1), ""), (Pictures(24), ""), (Pictures(), "2"), (Lines(), "")],
    ids=["content", "length", "version", "another"],
)
def test_another_dataset_is_packed_anew(tmp_path: Path, changed: Any, version: str) -> None:
    """In the same folder, of which nothing old is left; said as it begins."""
    said: list[str] = []
    old = packed(Pictures(), tmp_path / "p").fingerprint
    new = packed(changed, tmp_path / "p", version=version, tell=said.append)
    assert len(new.fingerprint) == len(old)
    assert "is not what was packed" in said[0]
    assert (new.fingerprint == old) == (version == "2")
    assert len(new.sample(len(changed) - 1)) == 2


def test_a_file_that_is_lost_or_cut_off_is_packed_again(tmp_path: Path) -> None:
    """It alone; sizes are looked at whenever the folder is opened."""
    fingerprint = packed(Pictures(), tmp_path / "p").fingerprint
    (tmp_path / "p" / "shard-000001.bin").unlink()
    with (tmp_path / "p" / "shard-000003.bin").open("r+b") as file:
        file.truncate(100)
    pictures = Pictures()
    assert packed(pictures, tmp_path / "p").fingerprint == fingerprint
    assert pictures.read[PROBES:] == [*range(5, 10), *range(15, 20)]


def test_a_file_that_is_cut_off_while_it_is_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name, and what to do; the process lives on."""
    monkeypatch.setattr("stoker.data.packed_format._SMALL_ROW", 0)
    source = packed(Pictures(), tmp_path / "p")
    source.rows(np.arange(SIZE))
    with (tmp_path / "p" / "shard-000002.bin").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(BadJob, match=r"shard-000002.bin cannot be read: it ends \d+ bytes before"):
        source.rows(np.arange(SIZE))
    with pytest.raises(BadJob, match=r"shard-000002.bin cannot be read"):
        source.sample(13)


def test_blocks_of_small_entries_are_kept_up_to_a_bound(
    pictures: data.PackedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels come right whether their blocks are kept, thrown out again, or not kept at all."""
    expected = torch.arange(SIZE)
    for kept, small in ((10**6, 512), (50, 512), (10**6, 0)):
        monkeypatch.setattr("stoker.data.packed_format._MOST_KEPT", kept)
        monkeypatch.setattr("stoker.data.packed_format._SMALL_ROW", small)
        source = packed(Pictures(), pictures.folder)
        assert all(torch.equal(source.rows(np.arange(SIZE))[1], expected) for _ in range(2))


def test_damage_is_found_and_mended_when_a_packed_dataset_is_opened(tmp_path: Path) -> None:
    """One byte of one file, of the same size: an open one raises, the next start packs that file again."""
    source = packed(Pictures(), tmp_path / "p")
    source.check()
    fingerprint, expected = source.fingerprint, source.rows(np.arange(SIZE))[0]
    path = tmp_path / "p" / "shard-000002.bin"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(BadJob, match=r"1 of 5 files of .* are damaged: shard-000002.bin"):
        source.check()
    lines: list[str] = []
    again = packed(Pictures(), tmp_path / "p", tell=lines.append)
    assert torch.equal(again.rows(np.arange(SIZE))[0], expected)
    assert again.fingerprint == fingerprint
    assert any("are damaged (shard-000002.bin): packing them again" in line for line in lines)


def test_what_is_packed_and_whole_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another user, or from a mount that is read-only: no lock is taken, and nothing is written into its folder."""
    folder = tmp_path / "p"
    expected = packed(Pictures(), folder).rows(np.arange(SIZE))[0]
    (folder / "lock").unlink()
    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setattr("stoker.data.packing._locked", None)
    assert torch.equal(packed(Pictures(), folder).rows(np.arange(SIZE))[0], expected)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_changed_manifest_of_a_packed_dataset_is_refused(tmp_path: Path) -> None:
    """Where its blocks lie decides what is read; so is one without a checksum."""
    packed(Pictures(), tmp_path / "p").rows(np.arange(1))
    path = tmp_path / "p" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][0]["blocks"][0]["offset"] += 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(BadJob, match="it is not as it was written"):
        packed(Pictures(), tmp_path / "p").rows(np.arange(1))
    manifest["shards"][0]["blocks"][0]["offset"] -= 64
    path.write_text(json.dumps({name: value for name, value in manifest.items() if name != "checksum"}))
    with pytest.raises(BadJob, match="it is not as it was written"):
        packed(Pictures(), tmp_path / "p").check()
    path.write_text(json.dumps(manifest))
    packed(Pictures(), tmp_path / "p").check()


def test_a_lost_file_of_a_dataset_that_has_changed_is_not_put_beside_the_others(tmp_path: Path) -> None:
    """Where the few samples that are compared do not show the change."""

    class Changed(Pictures):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image + (index == 9), label

    Changed.__qualname__, Changed.__module__ = Pictures.__qualname__, "stoker"
    Same = type("Pictures", (Pictures,), {"__module__": "stoker", "__qualname__": Pictures.__qualname__})
    packed(Same(), tmp_path / "p").rows(np.arange(1))
    (tmp_path / "p" / "shard-000001.bin").unlink()
    with pytest.raises(BadJob, match="was lost, and packed again it has other content than before"):
        packed(Changed(), tmp_path / "p").rows(np.arange(1))


def test_a_full_disk_leaves_nothing_and_says_how_much_is_needed(tmp_path: Path) -> None:
    """Not half a cache: the room it took is free again."""
    source = packed(Pictures(), tmp_path / "p")
    needed = "disk is full: packing Pictures takes about 3.5 KiB"
    with FaultyDisk.full(tmp_path, after_bytes=3000), pytest.raises(BadJob, match=needed):
        source.rows(np.arange(1))
    assert files(tmp_path / "p") == []
    assert source.rows(np.arange(1)) is not None


def test_what_the_disk_has_no_room_for_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sizes are reported, and nothing is written."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(BadJob, match=r"takes about 3.5 KiB, and 1000 B are free at"):
        packed(Pictures(), tmp_path / "p").rows(np.arange(1))
    assert files(tmp_path / "p") == []


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """What is in it is named."""
    (tmp_path / "thesis.tex").write_text("…", encoding="utf-8")
    with pytest.raises(BadJob, match=r"holds thesis.tex, and no packed dataset"):
        packed(Pictures(), tmp_path).rows(np.arange(1))
    with pytest.raises(BadJob, match="is a file, and a packed dataset is a folder"):
        packed(Pictures(), tmp_path / "thesis.tex").rows(np.arange(1))


class Broken(Pictures):
    """Sample 13 cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 13 and len(self.read) >= PROBES:
            raise OSError("truncated JPEG")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """What was packed before stays; once it is mended the rest follows."""
    with pytest.raises(BadJob, match="sample 13 of Broken raised OSError: truncated JPEG"):
        packed(Broken(), tmp_path / "p").rows(np.arange(1))
    assert "shard-000001.bin" in files(tmp_path / "p")


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        (Random(), "sample 21 of Random is another one each time it is read"),
        ([("cat", 1), ("dog", 0)], r"sample 0 of list\[0\] is a str, and a packed dataset holds numbers"),
        ([(1.0, 1), (1, 0)], "sample 1 of list is .*int64.*, and the first one is .*float64"),
        ([torch.zeros(2, dtype=torch.bfloat16)], "is a tensor of torch.bfloat16, which NumPy has no type for"),
        ([(Image.new("P", (2, 2)), 1)], r"sample 0 of list\[0\] is an image with a palette: .*\nTurn it into colours"),
    ],
    ids=["random", "text", "types", "bfloat16", "palette"],
)
def test_what_cannot_be_packed_is_a_bad_job(tmp_path: Path, dataset: Any, problem: str) -> None:
    """Before anything is written."""
    with pytest.raises(BadJob, match=problem):
        packed(dataset, tmp_path / "p").rows(np.arange(1))
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        (iter([1]), "takes samples by number"),
        ([], "has no samples"),
        ((np.zeros(3), np.zeros(2)), r"samples: \[2, 3\]"),
    ],
    ids=["stream", "empty", "lengths"],
)
def test_what_has_no_samples_by_number_is_refused(dataset: Any, problem: str) -> None:
    """When it is given."""
    with pytest.raises(BadJob, match=problem):
        data.packed(dataset)


def test_a_source_of_stoker_keeps_its_preparation(tmp_path: Path) -> None:
    """Stored samples are packed; classes, labels and preparation stay the source's."""
    digits = data.digits()[0].subset(0, 60)
    source = packed(digits, tmp_path / "p", shard_bytes=1000)
    samples, plain = as_samples(source, what="data"), as_samples(digits, what="data")
    indices = np.array([3, 59, 0], dtype=np.int64)
    for found, expected in zip(
        samples.prepare(samples.fetch(indices, 0)), plain.prepare(plain.fetch(indices, 0)), strict=True
    ):
        assert torch.equal(found, expected)
    assert np.array_equal(source.labels(), digits.arrays()[1].numpy())
    assert source.num_classes == 10
    assert source.name == digits.name


def test_without_a_path_each_dataset_has_a_folder_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for it, and another one for another dataset."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    one, other = data.packed(Pictures()), data.packed(Pictures(offset=1))
    assert one.folder.parent == tmp_path / "packed"
    assert one.folder.name.startswith("pictures-")
    assert one.folder != other.folder


@pytest.mark.parametrize("loader", ["inline", "workers", "memory"])
def test_batches_are_those_of_the_dataset_under_every_loader(tmp_path: Path, loader: str) -> None:
    """Bit for bit, from the middle on as well: the order and what is fetched are the same."""

    def batches(given: Any, how: str, start: int) -> Iterator[Any]:
        samples = as_samples(given, what="data")
        plan = Plan(device="cpu", micro_batch=7, loader=how, num_workers=2 if how == "workers" else 0)
        pipeline = InputPipeline(torch.device("cpu"), Fields(), samples.prepare)
        source = BatchSource(samples, pipeline, Extent(SIZE, 7), seed=3, plan=plan)
        return (b.cut(0, b.size) for b in source.batches(source.extent.position(start) if start else Position(), 9))

    expected = list(batches(Pictures(), "inline", 0))
    for start in (0, 5):
        found = list(batches(packed(Pictures(), tmp_path / "p"), loader, start))
        assert len(found) == 9 - start
        for one, other in zip(found, expected[start:], strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


def test_a_source_crosses_processes(pictures: data.PackedSource) -> None:
    """Where workers are started over: files are mapped there again."""
    images, _ = pickle.loads(pickle.dumps(pictures)).rows(np.array([5]))  # noqa: S301 - made here
    assert int(images[0, 0, 0, 0]) == 5


@pytest.mark.parametrize("wrap", [lambda read: read, property], ids=["method", "property"])
def test_labels_that_a_dataset_computes_are_not_taken_for_known(wrap: Any, tmp_path: Path) -> None:
    """They may take a read of every sample, which is done where classes are asked for and not before."""

    def labels(_self: object) -> Any:
        raise OSError("every file is read for these")

    dataset = type("Decoding", (list,), {"labels": wrap(labels)})([1.0, 2.0])
    assert data.packed(dataset, path=tmp_path / "p").reads_labels
    assert not data.packed([1.0, 2.0], path=tmp_path / "q").reads_labels
