"""A dataset decoded once, kept on disk in packed form, and read from there without decoding.

What: samples of any indexed source, as arrays in a few large files (see `packed_format`).
Use when: decoding slows training down, and the decoded samples do not fit into memory.
Costs: their decoded size on disk, and the time to decode each of them once.
Does not combine with: random draws in the dataset itself, which would be drawn once for all epochs; they belong into
Job(augment=…).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from stoker.data.arrays import ArraySource, digest_of
from stoker.data.files.source import IndexedSource, Indices, Labels, stated_classes
from stoker.data.packed_format import Header, SampleLayout, Shards, entries_of, layout_of
from stoker.data.packing import PackingTask, opened
from stoker.errors import BadJob
from stoker.jobs.code_digest import name_of, source_digest
from stoker.records import InputColumn
from stoker.store import cache_root
from stoker.store.files import sha256_file

if TYPE_CHECKING:
    from hashlib import _Hash


_PROBED = 16
"""Samples that are read to learn the layout, and to notice another dataset."""
_LEAST_SHARD, _MOST_SHARD, _SHARDS = 64 * 2**20, 256 * 2**20, 256


@final
class PackedSource(IndexedSource):
    """A dataset in packed form; packed when its samples, or its fingerprint, are first asked for.

    Batches are tensors where all samples have the same shapes; else samples are given one by one, as tensors.

    Args:
        dataset: see `packed`.
        path: the folder; None: one of its own in Stoker's cache.
        version: distinguishes versions of the dataset.
        shard_bytes: size of a file, about; None: 64 to 256 MiB.
        tell: is given lines about the progress of packing.
    """

    def __init__(
        self,
        dataset: Any,
        path: Path | None,
        *,
        version: str = "",
        shard_bytes: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        is_arrays = isinstance(dataset, tuple | Mapping)
        target = getattr(dataset, "target", None)  # of any type
        super().__init__(
            "arrays" if is_arrays else str(getattr(dataset, "name", None) or type(dataset).__name__),
            classes=stated_classes(dataset),
            target=target if isinstance(target, str | int) else None,
        )
        self.dataset = dataset
        # A dataset of the user's own may read every sample for them, whether in a method or in a property.
        self.reads_labels = bool(getattr(dataset, "reads_labels", hasattr(type(dataset), "labels")))
        self._given, self._version, self._shard_bytes = path, version, shard_bytes
        self._tell = tell or _on_standard_error
        if is_arrays:
            lengths = {len(array) for array in (dataset.values() if isinstance(dataset, Mapping) else dataset)}
            if len(lengths) != 1:
                raise BadJob(f"the arrays to pack have different numbers of samples: {sorted(lengths)}")
            (length,) = lengths
        elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            length = len(dataset)
        else:
            raise BadJob(
                f"stoker.data.packed takes samples by number, and a {type(dataset).__name__} has none",
                remedy="Give a dataset with __len__ and __getitem__, or arrays.",
            )
        if length == 0:
            raise BadJob("the dataset to pack has no samples", remedy="Give at least one sample.")
        self._length = length

    def __len__(self) -> int:
        """Number of samples, without reading any."""
        return self._length

    @property
    def note(self) -> str | None:
        """As the dataset's."""
        return getattr(self.dataset, "note", None)

    @property
    def encoding(self) -> Mapping[str, Sequence[object]]:
        """As the dataset's."""
        return self.dataset.encoding if isinstance(self.dataset, IndexedSource) else super().encoding

    @property
    def input_columns(self) -> Mapping[str | int, tuple[InputColumn, ...]]:
        """As the dataset's."""
        return self.dataset.input_columns if isinstance(self.dataset, IndexedSource) else super().input_columns

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the packed content: layout and every file's digest."""
        header = self._shards.manifest.header
        return digest_of(header.form, header.entries, *(shard.sha256 for shard in self._shards.manifest.shards))

    @property
    def folder(self) -> Path:
        """The folder it is packed in, or will be."""
        if self._given is not None:
            return self._given
        word = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-").lower() or "dataset"
        return cache_root() / "packed" / f"{word}-{self._probed.source.removeprefix('sha256:')[:16]}"

    @property
    def num_bytes(self) -> int:
        """Size on disk [bytes]; packs it if it is not yet."""
        return self._shards.manifest.num_bytes

    @property
    def estimated_bytes(self) -> int:
        """Size on disk [bytes], estimated from a few samples; nothing is packed."""
        return self._probed.num_bytes

    def sample(self, index: int) -> Any:
        """Sample `index` as it was packed, its entries as tensors."""
        import torch

        shards, layout = self._shards, self._probed.layout
        return layout.filled([torch.from_numpy(shards.one(entry, index)) for entry in range(len(layout.entries))])

    def sample_id(self, index: int) -> str:
        """Its name in the dataset, or its number."""
        named = getattr(self.dataset, "sample_id", None)
        return f"{index:08d}" if named is None else str(named(index))

    def rows(self, indices: Indices) -> Any:
        """The batch of the samples `indices` [B]; None where their shapes differ."""
        import torch

        shards, layout = self._shards, self._probed.layout
        if any(shards.shape_of(entry) is None for entry in range(len(layout.entries))):
            return None
        return layout.filled([torch.from_numpy(shards.rows(entry, indices)) for entry in range(len(layout.entries))])

    def labels(self) -> Labels | None:
        """Those the dataset states; else the last entry of its samples, where that is one whole number."""
        stated = getattr(self.dataset, "labels", None)
        if callable(stated):
            found: Labels | None = stated()
            return found
        form, entries = self._probed.layout.form, self._probed.layout.entries
        is_pair = isinstance(form, list) and form[-1] == len(entries) - 1
        if not is_pair or entries[-1].num_dims or np.dtype(entries[-1].dtype).kind not in "iu":
            return None
        return self._shards.rows(len(entries) - 1, np.arange(len(self))).astype(np.int64)

    def prepare(self, batch: Any) -> Any:
        """As the dataset does, where it does."""
        prepare = getattr(self.dataset, "prepare", None)
        return batch if prepare is None else prepare(batch)

    def check(self) -> None:
        """Read every file and compare it with its digest.

        Raises:
            BadJob: some of them are damaged.
        """
        folder, manifest = self.folder, self._shards.manifest
        damaged = [s.file_name for s in manifest.shards if sha256_file(folder / s.file_name) != s.sha256]
        if damaged:
            raise BadJob(
                f"{len(damaged)} of {len(manifest.shards)} files of {folder} are damaged: {', '.join(damaged[:5])}",
                remedy="Delete them: they are packed again when the dataset is next opened.",
            )

    @cached_property
    def _shards(self) -> Shards:
        """The complete packed dataset."""
        probed = self._probed
        folder = self.folder
        size = self._shard_bytes or min(max(_LEAST_SHARD, probed.num_bytes // _SHARDS), _MOST_SHARD)
        rows = max(1, min(len(self), size * len(self) // max(1, probed.num_bytes)))
        entries = tuple((entry.dtype, entry.num_dims) for entry in probed.layout.entries)
        header = Header(probed.source, len(self), rows, probed.layout.form, entries)
        packing = PackingTask(self.name, header, probed.layout, probed.read, probed.num_bytes, self._tell)
        return Shards(folder, opened(folder, packing))

    @cached_property
    def _probed(self) -> _Probed:
        return _Probed(self.dataset, self.name, len(self), self._version)


class _Probed:
    """Layout, size and identity of the dataset, found from a few samples.

    Raises:
        BadJob: samples cannot be packed, or differ from one reading to the next.
    """

    def __init__(self, dataset: Any, name: str, length: int, version: str) -> None:
        self.read = _reader_of(dataset)
        places = sorted({place * length // _PROBED for place in range(_PROBED)})
        self.layout: SampleLayout = layout_of(self.read(0), f"sample 0 of {name}")
        samples = [entries_of(self.read(at), self.layout, f"sample {at} of {name}") for at in places]
        again = entries_of(self.read(places[-1]), self.layout, f"sample {places[-1]} of {name}")
        digests = [digest_of(*(f"{a.shape}{a.tobytes().hex()}" for a in sample)) for sample in (*samples, again)]
        if digests.pop() != digests[-1]:
            raise BadJob(
                f"sample {places[-1]} of {name} is another one each time it is read: what is random in a dataset would "
                "be packed once, and the same in every epoch",
                remedy="Leave random draws out of the dataset, and give them as Job(augment=…).",
            )
        self.num_bytes = sum(array.nbytes for sample in samples for array in sample) * length // len(samples)
        kind = f"{name_of(type(dataset))} {source_digest(type(dataset))}"
        self.source = digest_of(kind, length, identity_of(dataset), version, *digests)


def packed(
    dataset: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    version: str = "",
    shard_bytes: int | None = None,
    tell: Callable[[str], None] | None = None,
) -> PackedSource:
    """`dataset` decoded once into files that are then read in its place.

    Packing begins when samples are first requested (by training, but also by `stoker plan`), reads every sample once,
    and continues where it stopped if it is killed. Free disk space is checked first. A folder holds one dataset:
    another one, or another version, replaces it. A dataset is identified by what it states (`fingerprint`) or holds in
    memory, its class and that class's source code, its length, `version`, and 16 of its samples.

    Args:
        dataset: a source of `stoker.data`, a map-style dataset, or a tuple or dict of arrays. Samples are numbers,
            tensors, arrays and images, or tuples, lists and dicts of these.
        path: the folder for it (default: one in Stoker's cache, which may be deleted).
        version: anything that distinguishes versions of the dataset, where those 16 samples may not.
        shard_bytes: size of a file, about (default: 64 to 256 MiB).
        tell: is given lines about the progress (default: they go to standard error).

    Raises:
        BadJob: `dataset` has no length or no samples by number. Samples that cannot be packed, and a full disk, raise
            it when the dataset is first read.

    >>> import tempfile
    >>> pictures = [(np.full((3, 2, 2), i, dtype=np.uint8), i % 10) for i in range(100)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     source = packed(pictures, folder, tell=lambda line: None)
    ...     images, labels = source.rows(np.array([42, 7]))
    >>> images[:, 0, 0, 0].tolist(), labels.tolist()
    ([42, 7], [2, 7])
    """
    # Absolute from the start: a job may be made in one folder and its data be read in another.
    folder = None if path is None else Path(path).expanduser().absolute()
    return PackedSource(dataset, folder, version=version, shard_bytes=shard_bytes, tell=tell)


def _reader_of(dataset: Any) -> Callable[[int], Any]:
    """From a number to the sample as it is stored, before `prepare`."""
    if isinstance(dataset, IndexedSource):
        return dataset.sample
    if isinstance(dataset, ArraySource | Mapping | tuple):
        return partial(_row, dataset)
    read: Callable[[int], Any] = dataset.__getitem__
    return read


def _row(arrays: Any, index: int) -> Any:
    """One row of each of a source's arrays, or of those in a tuple or dict."""
    if isinstance(arrays, Mapping):
        return {key: array[index] for key, array in arrays.items()}
    return tuple(array[index] for array in (arrays.arrays() if isinstance(arrays, ArraySource) else arrays))


def _on_standard_error(line: str) -> None:
    sys.stderr.write(f"{line}\n")


_WHOLE_BYTES = 2**30
_ROWS = 4096
_CONTENT = ("tensors", "data", "targets", "samples", "indices", "dataset")
"""Attributes of PyTorch's and torchvision's datasets that hold data in memory, or an inner dataset."""


def identity_of(dataset: Any) -> str:
    """A dataset's own `fingerprint`, else a digest of what it holds in memory.

    Arrays in memory count whole up to 1 GiB each; larger ones by 4,096 to 8,191 rows spread over them, as do mapped
    files, whose time of change counts besides. What is held otherwise does not count.
    """
    state = hashlib.sha256()
    if isinstance(dataset, Mapping):
        _add_all(state, dataset.items())
    elif isinstance(dataset, tuple):
        _add_all(state, enumerate(dataset))
    else:
        stated = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
        if isinstance(stated, str):
            return stated
        held = getattr(dataset, "__dict__", {})
        _add_all(state, ((name, held[name]) for name in _CONTENT if name in held))
    return state.hexdigest()


def _add_all(state: _Hash, entries: Iterable[tuple[Any, Any]]) -> None:
    for name, value in entries:
        state.update(f"{name}:".encode(errors="surrogateescape"))
        if name == "dataset":
            state.update(identity_of(value).encode())
        elif name == "tensors" and isinstance(value, tuple):
            _add_all(state, enumerate(value))
        elif hasattr(value, "__array__") and hasattr(value, "shape"):
            array = np.asanyarray(value)
            state.update(f"{array.dtype}{array.shape}".encode())
            mapped = getattr(array, "filename", None)
            if mapped is not None and os.path.exists(mapped):  # noqa: PTH110 - a name of any type that NumPy was given
                state.update(f"{os.stat(mapped).st_mtime_ns}".encode())  # noqa: PTH116 - likewise
            is_whole = array.ndim == 0 or (mapped is None and array.nbytes <= _WHOLE_BYTES)
            state.update((array if is_whole else array[:: max(1, len(array) // _ROWS)]).tobytes())
        elif isinstance(value, list | tuple | range):
            with suppress(TypeError, ValueError):  # only plain values: others may print differently in each process
                state.update(json.dumps(list(value)).encode())
