"""Samples: data with a length, a fingerprint and a way to fetch a batch; in memory, by item, or part of another set.

Reads that fail as a disk behind a network may are repeated, see `with_retries`.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import mmap
import struct
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch

from stoker.errors import BadJob, RunFailed, StokerError
from stoker.jobs import Holdout
from stoker.jobs.code_digest import name_of
from stoker.loading.fields import Content, map_tensors, with_sample_lists
from stoker.loading.order import EpochOrder, Indices, KeyedPermutation, Order, RandomStream, key_of, seed_generators
from stoker.records import DataClass

T = TypeVar("T")

_HASHED_ITEMS = 16


class BadSample(BadJob):
    """A sample could not be fetched or collated; made of its text alone, so that it can be pickled."""


class Samples(ABC):
    """Indexed samples, in batches. Fetched content is raw: `prepare` turns it into what the model takes."""

    name: str
    data_class: DataClass = "indexed"
    is_in_memory: bool

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of the samples `indices` [B]; raises BadSample."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest that changes when the data do; for datasets fetched by item, of a few items."""

    @abstractmethod
    def prepare(self, content: Content) -> Content:
        """Turn raw content into model inputs, after augmentation, on the device."""

    def order(self, seed: int) -> Order:
        """Their order in each epoch."""
        return EpochOrder(len(self), seed)

    def representative(self, count: int, micro_batch: int) -> Indices:
        """`count` samples with the shapes for forecasts of a micro-batch of `micro_batch` samples: here the first."""
        del micro_batch
        return np.arange(min(count, len(self)), dtype=np.int64)

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """The samples `indices` [B] one by one, not collated; raises BadSample."""
        content = self.fetch(indices, epoch)
        return [map_tensors(content, itemgetter(row)) for row in range(len(indices))]

    def fetch_drawn(self, indices: Indices, epoch: int, draws: Indices) -> Content:
        """As `fetch`, of samples that may occur several times in an epoch: their random draws are keyed by `draws`."""
        return self.fetch(indices, epoch)

    def all_of(self, _key: Any) -> torch.Tensor | None:
        """One entry of all samples, such as every target, if that needs no reading; else None."""
        return None

    @property
    def num_at_hand(self) -> int:
        """Number of first samples that can be fetched in any order at no more than their own cost [samples]."""
        return len(self)

    @property
    def num_bytes(self) -> int | None:
        """Memory of all samples [bytes]; None where they are not in memory."""
        return None

    def on(self, device: torch.device) -> Samples:
        """These samples with their arrays on `device`; raises BadJob unless they are arrays."""
        raise BadJob(
            f"{self.name} is fetched item by item, and cannot lie on {device}",
            remedy='Use loader "inline" or "workers".',
        )


class ArraySamples(Samples):
    """Tensors in memory, gathered without per-item Python.

    `load` returns the tensors, first dimension samples, as a tuple or dict; it is called on first use.
    """

    is_in_memory = True

    def __init__(
        self,
        name: str,
        length: int,
        load: Callable[[], Content],
        prepare: Callable[[Content], Content] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.name = name
        self._length = length
        self._load = load
        self._prepare = prepare
        self._fingerprint = fingerprint
        self._loaded: Content | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return self._length

    @property
    def arrays(self) -> Content:
        """The tensors; read on first use."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """Rows `indices` [B] of every array."""
        rows = torch.from_numpy(indices)
        arrays = self.arrays
        if isinstance(arrays, tuple):
            return tuple([_rows_of(array, rows) for array in arrays])
        return {key: _rows_of(array, rows) for key, array in arrays.items()}

    def fingerprint(self) -> str:
        """The source's own, or else the SHA-256 of the arrays (of strided rows beyond 1 GiB)."""
        if self._fingerprint is None:
            self._fingerprint = digest_of_arrays(leaves_of(self.arrays))
        return self._fingerprint

    def prepare(self, content: Content) -> Content:
        """The source's own preparation, such as bytes to normalised floats."""
        return content if self._prepare is None else self._prepare(content)

    def all_of(self, key: Any) -> torch.Tensor | None:
        """The array under `key`."""
        array: torch.Tensor = self.arrays[key]
        return array

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays [bytes]."""
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves_of(self.arrays))

    def on(self, device: torch.device) -> Samples:
        """These samples with their arrays on `device`."""
        placed = copy.copy(self)
        placed._loaded = map_tensors(self.arrays, lambda array: array.to(device))  # noqa: SLF001 - a copy of our own
        return placed


class ItemSamples(Samples):
    """A map-style dataset: items fetched one by one and collated.

    Before item `i` is fetched, Python's, NumPy's and PyTorch's generators are seeded from (seed, epoch, i), and the
    dataset's `set_epoch(epoch)` is called where it has one and was last read in another epoch.
    """

    is_in_memory = False

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self.dataset = dataset
        self._with_epochs = tuple(_with_epochs(dataset))
        self.name = type(dataset).__name__
        self._collate = collate or torch.utils.data.default_collate
        self._seed = seed

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.dataset)

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """Items `indices` [B], collated."""
        return self.collate(self.items(indices, epoch), indices)

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """Items `indices` [B]."""
        return [self.item((epoch, int(index))) for index in indices]

    def fetch_drawn(self, indices: Indices, epoch: int, draws: Indices) -> Content:
        """Items `indices` [B], collated; each occurrence has random draws of its own."""
        pairs = zip(indices.tolist(), draws.tolist(), strict=True)
        return self.collate([self._keyed(index, epoch, draw) for index, draw in pairs], indices)

    def item(self, place: tuple[int, int]) -> Any:
        """Item (epoch, index) of the dataset, its random draws keyed."""
        epoch, index = place
        return self._keyed(index, epoch, index)

    def _keyed(self, index: int, epoch: int, draw: int) -> Any:
        """Item `index`, its random draws keyed by the epoch and `draw`."""

        def read() -> Any:
            for dataset in self._with_epochs:
                _enter(dataset, epoch)
            seed_generators(key_of(RandomStream.ITEM, self._seed, epoch, draw))
            return self.read(index)

        try:
            return with_retries(read)
        except RunFailed:  # the watchdog's verdict on a dataset that hangs
            raise
        except StokerError as error:
            raise BadSample(str(error)) from error
        except Exception as error:
            what = f"sample {self.named(index)} of {self.name}"
            raise BadSample(f"{what} raised {type(error).__name__}: {error}") from error

    def read(self, index: int) -> Any:
        """The dataset's item at `index`."""
        return self.dataset[index]

    def named(self, index: int) -> str:
        """The name of sample `index` in errors."""
        return str(index)

    def collate(self, items: list[Any], indices: Indices | None = None) -> Content:
        """A batch of items; the error names the ones that differ in shape."""
        is_ours = self._collate is torch.utils.data.default_collate
        # A collate function may take entries out of its items, as by `item.pop("label")`.
        kept = [] if is_ours else [map_tensors(item, lambda tensor: tensor) for item in items]
        try:
            content = self._collate(items)
        except Exception as error:
            named = _shape_mismatch(items, indices, self.named) if is_ours else None
            raised = f"collating {len(items)} samples of {self.name} raised {type(error).__name__}: {error}"
            raise BadSample(named or raised) from error
        return content if is_ours else with_sample_lists(content, len(items), lambda: self._with_one_more(kept))

    def _with_one_more(self, items: list[Any]) -> Content | None:
        """A batch of copies of `items`, the first of them twice; None where the collate function cannot take that."""
        try:
            return self._collate([copy.deepcopy(item) for item in (*items, items[0])])  # it may change tensors in place
        except Exception:  # noqa: BLE001 - whatever it raises: only the form of the result was to be seen
            return None

    def fingerprint(self) -> str:
        """Digest of the dataset's type, its length and a few of its items."""
        chosen = KeyedPermutation(len(self), key_of(RandomStream.PROBE))(np.arange(min(_HASHED_ITEMS, len(self))))
        what = f"{name_of(type(self.dataset))}:{len(self)}"
        items = (self.item((0, int(index))) for index in chosen)
        return f"{digest_of_items(what, items)} (of {len(chosen)} items)"

    def prepare(self, content: Content) -> Content:
        """Nothing: items come prepared."""
        return content


def _with_epochs(dataset: Any) -> Iterator[Any]:
    """The dataset, or those within PyTorch's wrappers of it, that have `set_epoch`."""
    if callable(getattr(dataset, "set_epoch", None)):
        yield dataset
    elif isinstance(dataset, torch.utils.data.Subset):
        yield from _with_epochs(dataset.dataset)
    elif isinstance(dataset, torch.utils.data.ConcatDataset):
        for part in dataset.datasets:
            yield from _with_epochs(part)


_EPOCHS: dict[int, tuple[Callable[[], Any], int]] = {}
"""The epoch last set of a dataset, by its id: `data` and `valid` may be parts of one dataset."""


def _enter(dataset: Any, epoch: int) -> None:
    """Set the epoch of the items that are read next, unless it is set."""
    known, last = _EPOCHS.get(id(dataset), (lambda: None, None))
    if known() is not dataset or last != epoch:
        dataset.set_epoch(epoch)
        _EPOCHS[id(dataset)] = (_reference(dataset), epoch)


def _reference(dataset: Any) -> Callable[[], Any]:
    """A function that returns a dataset as long as it is there; always, where its class has no weak references."""
    try:
        return weakref.ref(dataset)
    except TypeError:  # __slots__
        return lambda: dataset


class RearrangedSamples(Samples):
    """The samples of another, with another choice or order; `how` goes into its name."""

    def __init__(self, whole: Samples, how: str) -> None:
        self.whole = whole
        self.how = how
        self.name = f"{whole.name} ({how})"
        self.data_class = whole.data_class
        self.is_in_memory = whole.is_in_memory

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.whole)

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The whole's batch."""
        return self.whole.fetch(indices, epoch)

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """The whole's samples."""
        return self.whole.items(indices, epoch)

    def fingerprint(self) -> str:
        """The whole's: their choice and order are part of the job's settings."""
        return self.whole.fingerprint()

    def prepare(self, content: Content) -> Content:
        """As the whole does."""
        return self.whole.prepare(content)

    def all_of(self, key: Any) -> torch.Tensor | None:
        """The whole's entry."""
        return self.whole.all_of(key)

    @property
    def num_bytes(self) -> int | None:
        """Memory of the whole [bytes]: a part is gathered from all of it."""
        return self.whole.num_bytes

    def on(self, device: torch.device) -> Samples:
        """The same with the whole's arrays on `device`."""
        placed = copy.copy(self)
        placed.whole = self.whole.on(device)
        return placed


class OrderedSamples(RearrangedSamples):
    """The samples of another in an order of their own: `order_of` makes it from the job's seed."""

    def __init__(self, whole: Samples, how: str, order_of: Callable[[int], Order]) -> None:
        super().__init__(whole, how)
        self._order_of = order_of

    def order(self, seed: int) -> Order:
        """The order of each epoch."""
        return self._order_of(seed)


class SampleSubset(RearrangedSamples):
    """Samples `indices` of another."""

    def __init__(self, whole: Samples, indices: Indices, what: str) -> None:
        super().__init__(whole, what)
        self.indices = indices

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices)

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of these samples of the subset."""
        return self.whole.fetch(self.indices[indices], epoch)

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """These samples of the subset, one by one."""
        return self.whole.items(self.indices[indices], epoch)

    def fetch_drawn(self, indices: Indices, epoch: int, draws: Indices) -> Content:
        """The batch of these samples of the subset, with the whole's random draws."""
        return self.whole.fetch_drawn(self.indices[indices], epoch, draws)

    def fingerprint(self) -> str:
        """The whole's, and which part this is."""
        return f"{self.whole.fingerprint()} {self.how}"

    def all_of(self, key: Any) -> torch.Tensor | None:
        """The whole's entry, these rows."""
        entry = self.whole.all_of(key)
        return None if entry is None else entry[torch.from_numpy(self.indices)]


def rows_of(samples: Samples, given: Indices) -> Indices:
    """The rows of `given`, values for all of a job's data [N], that belong to `samples`, all of it or a subset."""
    return given[samples.indices] if isinstance(samples, SampleSubset) else given


def hold_out(samples: Samples, holdout: Holdout) -> tuple[Samples, Samples]:
    """The rest and the part set aside, each in its original order.

    Raises:
        BadJob: one of the two would be empty.
    """
    order, aside = drawn_for(holdout, len(samples))
    rule = f"{holdout.fraction:g} held out, seed {holdout.seed}"
    return (
        SampleSubset(samples, np.sort(order[aside:]), f"without the {rule}"),
        SampleSubset(samples, np.sort(order[:aside]), f"the {rule}"),
    )


def drawn_for(holdout: Holdout, count: int) -> tuple[Indices, int]:
    """All `count` samples in the order in which they are drawn to be set aside, and the number set aside.

    Raises:
        BadJob: none or all would be.
    """
    aside = round(count * holdout.fraction)
    if not 0 < aside < count:
        raise BadJob(
            f"a holdout of {holdout.fraction:g} sets {aside} of {count} samples aside",
            remedy="Both parts need samples: choose another fraction, or give valid=… data of its own.",
        )
    return KeyedPermutation(count, key_of(RandomStream.HOLDOUT, holdout.seed))(np.arange(count)), aside


def _rows_of(array: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # A copy that blocks would wait for all that a GPU has to do.
    return array.index_select(0, rows.to(array.device, non_blocking=True))


def _shape_mismatch(items: list[Any], indices: Indices | None, named: Callable[[int], str]) -> str | None:
    """The first two samples that differ in shape, or None."""
    shapes = [[tuple(getattr(leaf, "shape", ())) for leaf in leaves_of(item)] for item in items]
    for place, shape in enumerate(shapes):
        if shape == shapes[0]:
            continue
        difference = f"how much they hold: {len(shapes[0]):,} and {len(shape):,} numbers or arrays"
        for first_leaf, leaf in zip(shapes[0], shape, strict=False):
            if first_leaf != leaf:
                difference = f"shape: {list(first_leaf)} and {list(leaf)}"
                break
        first, other = (0, place) if indices is None else (int(indices[0]), int(indices[place]))
        return (
            f"samples {named(first)} and {named(other)} differ in {difference}; "
            "make them equal in the dataset, or give stoker.Fields(collate=…) that pads them"
        )
    return None


PAUSES_S = (0.2, 1.0, 5.0)
"""Pauses before a read with a transient error is tried again [s]; then the error stands."""

_TRANSIENT_NAMES = (
    "EIO ESTALE ETIMEDOUT EAGAIN ECONNRESET ECONNABORTED ECONNREFUSED ENOTCONN ENETDOWN ENETUNREACH ENETRESET "
    "EHOSTDOWN EHOSTUNREACH EREMOTEIO"
)
_TRANSIENT = frozenset(getattr(errno, name) for name in _TRANSIENT_NAMES.split() if hasattr(errno, name))
"""Errors of a network disk while its server is away. A missing file is not one of them."""

_COUNTED = struct.Struct("qq")
_again = mmap.mmap(-1, _COUNTED.size)
"""Number of repeated reads, and the last error number; shared with forked workers, without a file."""


def reads_repeated() -> tuple[int, int]:
    """Number of repeated reads in this process and its forked workers, and the last error number."""
    number, code = _COUNTED.unpack(_again[:])
    return number, code


def with_retries(read: Callable[[], T]) -> T:
    """The result of `read`, which is repeated with growing pauses after a transient error of a network disk."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except Exception as error:
            code = _transient_errno(error)
            if code is None:
                raise
            _again[:] = _COUNTED.pack(reads_repeated()[0] + 1, code)
            time.sleep(pause_s)
    return read()


def _transient_errno(error: BaseException | None) -> int | None:
    """The number of a transient OSError in `error` or its causes; None where there is none."""
    for _ in range(10):
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return error.errno
        if isinstance(error, TimeoutError | ConnectionError):
            return error.errno or errno.ETIMEDOUT
        if error is None:
            break
        error = error.__cause__ or error.__context__
    return None


_WHOLE_BYTES = 2**30
_ROWS = 4096


def digest_of_arrays(leaves: Iterable[Any]) -> str:
    """SHA-256 of arrays, as "sha256:…"; of an array beyond 1 GiB, of 4,096 to 8,191 rows spread over it."""
    state = hashlib.sha256()
    for leaf in leaves:
        is_whole = not isinstance(leaf, torch.Tensor) or leaf.numel() * leaf.element_size() <= _WHOLE_BYTES
        state.update(f"{getattr(leaf, 'shape', '')}".encode())
        _add(state, leaf if is_whole else leaf[:: max(1, leaf.shape[0] // _ROWS)])
    return f"sha256:{state.hexdigest()}"


def digest_of_items(what: str, items: Iterable[Any]) -> str:
    """SHA-256 of a few samples and the description `what`, as "sha256:…"."""
    state = hashlib.sha256(what.encode())
    for item in items:
        for leaf in leaves_of(item):
            _add(state, leaf)
    return f"sha256:{state.hexdigest()}"


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested dicts, tuples and lists in order, keys included."""
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in (key, *leaves_of(value[key]))]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def _add(state: hashlib._Hash, leaf: Any) -> None:
    """Feed a leaf to `state`; only its type if it has no bytes."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        state.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        state.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(leaf, bool | int | float | str | bytes) or leaf is None:
        state.update(repr(leaf).encode())
    else:
        size = getattr(leaf, "shape", getattr(leaf, "size", ""))  # of an array; of an image of PIL
        state.update(f"{type(leaf).__name__}{getattr(leaf, 'dtype', '')}{'' if callable(size) else size}".encode())
        if getattr(getattr(leaf, "dtype", None), "hasobject", False):  # of NumPy: its bytes are addresses
            for item in leaves_of(leaf.tolist()):
                _add(state, item)
        else:
            state.update(leaf.tobytes() if hasattr(leaf, "tobytes") else b"")
