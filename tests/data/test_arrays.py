from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from stoker.data import ArraySource, Field, digits
from stoker.data.arrays import digest_of, standardised
from stoker.errors import BadJob


class Counting(ArraySource):
    """Six samples, value and index; counts how often it is loaded."""

    def __init__(self) -> None:
        super().__init__("counting", (Field("value", (2,), "uint8"), Field("at", (), "int64")), num_classes=None)
        self.num_loads = 0

    def __len__(self) -> int:
        return 6

    @property
    def fingerprint(self) -> str:
        return "sha256:counting"

    def prepare(self, batch):
        values, at = batch
        return standardised(values, mean=1.0, std=2.0), at

    def _load(self):
        self.num_loads += 1
        return torch.arange(12, dtype=torch.uint8).view(6, 2), torch.arange(6)


def test_a_source_is_described_without_torch():
    """Constructing every source, its length, fields and fingerprint load no torch."""
    code = """
import sys
from stoker import data
for source in (*data.fashion_mnist(), *data.digits(), *data.python_source()):
    part = source.subset(0, len(source) // 2)
    assert part.fingerprint.startswith("sha256:") and len(part) and part.fields[0].num_bytes, part.name
    assert source.is_here() in (True, False) if hasattr(source, "is_here") else True
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_constructing_a_source_opens_no_file():
    """Not one file or folder is opened between asking for the sources and having them."""
    code = """
import sys
from stoker import data
sources = data.fashion_mnist, data.digits, data.python_source  # their modules are loaded here
opened = []
sys.addaudithook(lambda event, args: opened.append((event, args)) if event in ("open", "os.listdir", "os.scandir",
    "socket.connect", "socket.getaddrinfo", "urllib.Request") else None)
[source() for source in sources]
assert not opened, opened
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_arrays_are_loaded_once_and_shared_with_parts():
    """The source, its parts and the parts of those hold the same memory after one load."""
    source = Counting()
    part = source.subset(1, 5).subset(1, 3)
    assert part.arrays()[0].data_ptr() == source.arrays()[0].data_ptr() + 4
    source.arrays(), part.arrays(), source.gather(torch.tensor([0])), part[0]
    assert source.num_loads == 1


def test_a_part_counts_from_its_own_start():
    """Items and batches of a part are those of the whole, shifted by where it starts."""
    source = Counting()
    part = source.subset(2, 5)
    assert len(part) == 3
    assert [int(part[at][1]) for at in range(3)] == [2, 3, 4]
    assert part.gather(torch.tensor([2, 0]))[1].tolist() == [4, 2]
    assert part.arrays()[1].tolist() == [2, 3, 4]


def test_parts_differ_in_name_and_fingerprint():
    """Another part of the same source is other data."""
    source = Counting()
    parts = [source, source.subset(0, 3), source.subset(3, 6), source.subset(0, 6).subset(0, 3)]
    assert len({part.fingerprint for part in parts}) == len({part.name for part in parts}) == 4


def test_a_part_keeps_the_note_and_the_classes():
    """What the user should know, and the range of labels, pass to parts."""
    source = Counting()
    source.note, source.num_classes = "look here", 3
    assert (source.subset(0, 1).note, source.subset(0, 1).num_classes) == ("look here", 3)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 7), (4, 2)])
def test_a_part_must_lie_within_its_source(start, stop):
    """A range outside is refused with the numbers."""
    with pytest.raises(BadJob, match=rf"counting has 6 samples; {start}:{stop}"):
        Counting().subset(start, stop)


def test_an_item_is_prepared_and_a_gathered_batch_is_raw():
    """`source[i]` is what the model takes; `gather` is what is stored, for augmentation to work on."""
    source = Counting()
    assert torch.equal(source[3][0], torch.tensor([2.5, 3.0]))
    raw, _ = source.gather(torch.tensor([3]))
    assert raw.dtype == torch.uint8
    assert torch.equal(source.prepare((raw, torch.tensor([3])))[0][0], source[3][0])


def test_indices_count_from_the_end_and_stop_at_the_ends():
    """-1 is the last sample; beyond either end there is none, which also ends a loop over the source."""
    source = Counting()
    assert int(source[-1][1]) == 5
    assert [int(at) for _, at in source] == [0, 1, 2, 3, 4, 5]
    for beyond in (6, -7):
        with pytest.raises(IndexError, match="counting has 6 samples"):
            _ = source[beyond]


def test_preparing_leaves_the_raw_batch_as_it_was():
    """Also where the batch is float32 already, as after an augmentation that computes in it."""
    raw = torch.tensor([[3.0, 5.0]])
    assert torch.equal(standardised(raw, mean=1.0, std=2.0), torch.tensor([[1.0, 2.0]]))
    assert torch.equal(raw, torch.tensor([[3.0, 5.0]]))


def test_a_field_knows_its_size():
    """Bytes of an entry are its shape's product times its dtype's size; a label is one number."""
    assert Field("image", (1, 28, 28), "uint8").num_bytes == 784
    assert Field("label", (), "int64").num_bytes == 8


@pytest.mark.parametrize("source", digits(), ids=lambda source: source.name)
def test_fields_say_what_the_arrays_are(source):
    """Shapes, dtypes and length stated before loading are those found after it."""
    arrays = source.arrays()
    assert [tuple(array.shape) for array in arrays] == [(len(source), *field.shape) for field in source.fields]
    assert [str(array.dtype) for array in arrays] == [f"torch.{field.dtype}" for field in source.fields]


def test_a_source_crosses_to_another_process():
    """A loaded source survives pickling, as spawned loader workers need."""
    _, test = digits()
    image, label = test[7]
    again = pickle.loads(pickle.dumps(test))  # noqa: S301 - our own bytes
    assert torch.equal(again[7][0], image)
    assert again[7][1] == label


def test_digests_tell_parts_apart():
    """A digest depends on every part and on where one ends."""
    assert len({digest_of("ab", "c"), digest_of("a", "bc"), digest_of("abc"), digest_of("c", "ab")}) == 4
