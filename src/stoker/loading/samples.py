"""Samples: whatever data a user gives, as one thing that knows its length, its identity and how to fetch a batch."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs import Holdout
from stoker.loading.fields import Content
from stoker.loading.keys import Stream, key_of
from stoker.loading.order import Indices, KeyedPermutation
from stoker.records import DataClass

_HASHED_WHOLE_BYTES = 2**30
_HASHED_ROWS = 4096
_HASHED_ITEMS = 16


class BadSample(Exception):
    """A sample that could not be fetched or collated; carries only text, so that it crosses processes."""


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
        """A digest that changes when the data does; for datasets fetched by item, of a few items."""

    @abstractmethod
    def prepare(self, content: Content) -> Content:
        """Turn raw content into model inputs, after augmentation, on the device."""

    def all_of(self, _key: Any) -> torch.Tensor | None:
        """One entry of all samples at once where that costs nothing, such as every target; else None."""
        return None


class ArraySamples(Samples):
    """Tensors that lie in memory, gathered without per-item Python.

    `load` gives the tensors, first dimension samples, as a tuple or dict; it is called on first use.
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
        if isinstance(arrays, Mapping):
            return {key: array.index_select(0, rows) for key, array in arrays.items()}
        return tuple(array.index_select(0, rows) for array in arrays)

    def fingerprint(self) -> str:
        """What the source states, or else the SHA-256 of the arrays (of strided rows beyond 1 GiB)."""
        if self._fingerprint is None:
            self._fingerprint = _digest_of_arrays(_leaves(self.arrays))
        return self._fingerprint

    def prepare(self, content: Content) -> Content:
        """The source's own preparation, such as bytes to normalised floats."""
        return content if self._prepare is None else self._prepare(content)

    def all_of(self, key: Any) -> torch.Tensor | None:
        """The array under `key`."""
        found: torch.Tensor = self.arrays[key]
        return found


class ItemSamples(Samples):
    """A map-style dataset: items fetched one by one and collated.

    Before item `i` is fetched, Python's, NumPy's and PyTorch's generators are seeded from (seed, epoch, i).
    """

    is_in_memory = False

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self.dataset = dataset
        self.name = type(dataset).__name__
        self._collate = collate or torch.utils.data.default_collate
        self._seed = seed

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.dataset)

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """Items `indices` [B], collated."""
        return self.collate([self.item((epoch, int(index))) for index in indices], indices)

    def item(self, place: tuple[int, int]) -> Any:
        """Item (epoch, index) of the dataset, its random draws keyed."""
        epoch, index = place
        seed_generators(key_of(Stream.ITEM, self._seed, epoch, index))
        try:
            return self.dataset[index]
        except Exception as error:
            raise BadSample(f"sample {index} of {self.name} raised {type(error).__name__}: {error}") from error

    def collate(self, items: list[Any], indices: Indices | None = None) -> Content:
        """A batch of items; says which ones differ in shape when they do not stack."""
        try:
            return self._collate(items)
        except Exception as error:
            named = _shape_mismatch(items, indices)
            raise BadSample(
                named or f"collating {len(items)} samples raised {type(error).__name__}: {error}"
            ) from error

    def fingerprint(self) -> str:
        """Digest of the dataset's type, its length and a few of its items."""
        state = hashlib.sha256(f"{type(self.dataset).__module__}.{self.name}:{len(self)}".encode())
        chosen = KeyedPermutation(len(self), key_of(Stream.PROBE))(np.arange(min(_HASHED_ITEMS, len(self))))
        for index in chosen:
            for leaf in _leaves(self.item((0, int(index)))):
                state.update(_bytes_of(leaf))
        return f"sha256:{state.hexdigest()} (of {len(chosen)} items)"

    def prepare(self, content: Content) -> Content:
        """Nothing: items come prepared."""
        return content


class SubsetOf(Samples):
    """Samples `indices` of another."""

    def __init__(self, whole: Samples, indices: Indices, what: str) -> None:
        self.whole = whole
        self.indices = indices
        self.what = what
        self.name = f"{whole.name} ({what})"
        self.data_class = whole.data_class
        self.is_in_memory = whole.is_in_memory

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices)

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of these samples of the subset."""
        return self.whole.fetch(self.indices[indices], epoch)

    def fingerprint(self) -> str:
        """The whole's, and which part this is."""
        return f"{self.whole.fingerprint()} {self.what}"

    def prepare(self, content: Content) -> Content:
        """As the whole does."""
        return self.whole.prepare(content)

    def all_of(self, key: Any) -> torch.Tensor | None:
        """The whole's entry, these rows."""
        found = self.whole.all_of(key)
        return None if found is None else found[torch.from_numpy(self.indices)]


def as_samples(data: Any, *, what: str, collate: Callable[[list[Any]], Any] | None = None, seed: int = 0) -> Samples:
    """`data` as Samples; `what` names it in errors ("data", "valid", "test").

    Raises:
        BadJob: a kind of data that is not supported, arrays of different lengths, or no samples at all.
    """
    samples = _as_samples(data, what, collate, seed)
    if len(samples) == 0:
        raise BadJob(f"{what} has no samples", remedy="Give at least one sample.")
    return samples


def hold_out(samples: Samples, holdout: Holdout) -> tuple[Samples, Samples]:
    """The rest and the part set aside, each in its original order.

    Raises:
        BadJob: one of the two would be empty.
    """
    aside = round(len(samples) * holdout.fraction)
    if not 0 < aside < len(samples):
        raise BadJob(f"a holdout of {holdout.fraction:g} sets {aside} of {len(samples)} samples aside")
    permutation = KeyedPermutation(len(samples), key_of(Stream.HOLDOUT, holdout.seed))
    order = permutation(np.arange(len(samples)))
    rule = f"{holdout.fraction:g} held out, seed {holdout.seed}"
    return (
        SubsetOf(samples, np.sort(order[aside:]), f"without the {rule}"),
        SubsetOf(samples, np.sort(order[:aside]), f"the {rule}"),
    )


def seed_generators(key: int, device: torch.device | None = None) -> None:
    """Seed Python's, NumPy's and PyTorch's CPU generators, and that of `device` if it has its own."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002: the global generator is the one that users' code draws from
    torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


def _as_samples(data: Any, what: str, collate: Callable[[list[Any]], Any] | None, seed: int) -> Samples:
    if isinstance(data, torch.utils.data.IterableDataset):
        raise BadJob(f"{what} is an IterableDataset: streams are not supported yet",
                     remedy="Give a map-style dataset (with __len__ and __getitem__) or arrays.")  # fmt: skip
    if hasattr(data, "arrays") and hasattr(data, "prepare"):  # one of stoker.data
        return ArraySamples(data.name, len(data), data.arrays, data.prepare, data.fingerprint)
    if isinstance(data, torch.utils.data.TensorDataset) and collate is None:
        return _arrays(data.tensors, what)
    if isinstance(data, Mapping) or (isinstance(data, tuple | list) and data and all(map(_is_array, data))):
        return _arrays(data, what)
    if _is_array(data):
        return _arrays((data,), what)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | bytes):
        return ItemSamples(data, collate, seed)
    raise BadJob(
        f"{what} is a {type(data).__name__}, wanted arrays, a map-style dataset or one of stoker.data",
        remedy="Give a tuple of tensors or NumPy arrays (inputs, targets), or an object with __len__ and __getitem__.",
    )


def _arrays(data: Mapping[Any, Any] | Sequence[Any], what: str) -> ArraySamples:
    named = dict(data) if isinstance(data, Mapping) else dict(enumerate(data))
    tensors = {key: torch.as_tensor(array) for key, array in named.items()}
    lengths = {key: tensor.shape[0] if tensor.dim() else 0 for key, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key}: {length}" for key, length in lengths.items())
        raise BadJob(f"the arrays of {what} have different numbers of samples ({listed})")
    content = tensors if isinstance(data, Mapping) else tuple(tensors.values())
    return ArraySamples("arrays", next(iter(lengths.values())), lambda: content)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in (key, *_leaves(value[key]))]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{leaf.dtype}{tuple(leaf.shape)}".encode() + flat.numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes()
    return repr(leaf).encode() if isinstance(leaf, bool | int | float | str | bytes) else type(leaf).__name__.encode()


def _digest_of_arrays(leaves: list[Any]) -> str:
    state = hashlib.sha256()
    for leaf in leaves:
        whole = not isinstance(leaf, torch.Tensor) or leaf.numel() * leaf.element_size() <= _HASHED_WHOLE_BYTES
        state.update(f"{getattr(leaf, 'shape', '')}".encode())
        state.update(_bytes_of(leaf if whole else leaf[:: max(1, leaf.shape[0] // _HASHED_ROWS)]))
    return f"sha256:{state.hexdigest()}"


def _shape_mismatch(items: list[Any], indices: Indices | None) -> str | None:
    """Which two samples differ in shape, or None."""
    shapes = [[tuple(getattr(leaf, "shape", ())) for leaf in _leaves(item)] for item in items]
    for at, shape in enumerate(shapes):
        if shape != shapes[0]:
            first, other = (0, at) if indices is None else (int(indices[0]), int(indices[at]))
            pair = next(((a, b) for a, b in zip(shapes[0], shape, strict=False) if a != b), (shapes[0], shape))
            return (
                f"samples {first} and {other} differ in shape: {list(pair[0])} and {list(pair[1])}; "
                "make them equal in the dataset, or give Job(collate=…) that pads them"
            )
    return None
