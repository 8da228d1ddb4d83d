"""Adapters from a user's data (arrays, map-style datasets, sources of `stoker.data`) to `Samples`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stoker.data.files.huggingface import as_source
from stoker.data.files.source import IndexedSource
from stoker.errors import BadJob, StokerError
from stoker.loading.fields import Content
from stoker.loading.order import Indices
from stoker.loading.samples import ArraySamples, BadSample, ItemSamples, Samples, with_retries

_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
_IN_ITEMS = "Give a dataset whose items are of a type that it computes with, as by .astype('int32') in __getitem__."


def as_samples(data: Any, *, what: str, collate: Callable[[list[Any]], Any] | None = None, seed: int = 0) -> Samples:
    """`data` as Samples; `what` names it in errors ("data", "valid", "test").

    Raises:
        BadJob: unsupported data; arrays of different lengths, or with a `collate`; or no samples.
    """
    samples = _as_samples(data, what, collate, seed)
    if len(samples) == 0:
        raise BadJob(f"{what} has no samples", remedy="Give at least one sample.")
    return samples


def _as_samples(data: Any, what: str, collate: Callable[[list[Any]], Any] | None, seed: int) -> Samples:
    if isinstance(data, torch.utils.data.IterableDataset):
        raise BadJob(
            f"{what} is an IterableDataset, which has no samples by number",
            remedy="Give a map-style dataset (with __len__ and __getitem__) or arrays.",
        )
    _require_no_frames(data, what)
    data = as_source(data)
    if isinstance(data, IndexedSource):
        return SourceSamples(data, collate, seed)
    if type(data) is torch.utils.data.TensorDataset and collate is None:  # a subclass may change its items
        return _arrays(data.tensors, what)
    is_of_arrays = isinstance(data, Mapping) or (isinstance(data, tuple) and any(map(_is_array, data)))
    is_loaded = hasattr(data, "arrays") and hasattr(data, "prepare")  # one of stoker.data
    if collate is not None and (is_of_arrays or is_loaded or _is_array(data)):
        raise BadJob(
            f"stoker.Fields(collate=…) makes batches of single samples, and {what} are arrays, of which rows are taken",
            remedy="Leave collate out, or give a dataset with __len__ and __getitem__.",
        )
    if is_loaded:
        return ArraySamples(data.name, len(data), data.arrays, data.prepare, data.fingerprint)
    if is_of_arrays:
        return _arrays(data, what)
    if isinstance(data, list) and data and all(map(_is_array, data)):
        raise BadJob(
            f"{what} is a list of {len(data)} arrays: it could be their samples or their entries",
            remedy="Give a tuple (inputs, targets) of arrays; stack samples into one array.",
        )
    if _is_array(data):
        return _arrays((data,), what)
    if collate is None:
        _require_no_columns(data, what)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | bytes):
        return ItemSamples(data, collate, seed)
    raise BadJob(
        f"{what} is a {type(data).__name__}, wanted arrays, a map-style dataset or one of stoker.data",
        remedy="Give a tuple of tensors or NumPy arrays (inputs, targets), or an object with __len__ and __getitem__.",
    )


def _arrays(data: Mapping[Any, Any] | Sequence[Any], what: str) -> ArraySamples:
    named = dict(data) if isinstance(data, Mapping) else dict(enumerate(data))
    tensors = {key: _as_tensor(array, f"{what}[{key!r}]") for key, array in named.items()}
    lengths = {key: tensor.shape[0] if tensor.dim() else 0 for key, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key}: {length}" for key, length in lengths.items())
        raise BadJob(f"the arrays of {what} have different numbers of samples ({listed})")
    content = tensors if isinstance(data, Mapping) else tuple(tensors.values())
    return ArraySamples("arrays", next(iter(lengths.values()), 0), lambda: content)


def _require_no_frames(data: Any, what: str) -> None:
    """Raise BadJob for tables of pandas and Polars, whose columns no model takes by name."""
    parts = data.values() if isinstance(data, Mapping) else data[:4] if isinstance(data, tuple | list) else (data,)
    kind = next((type(part) for part in parts if callable(getattr(part, "to_numpy", None))), None)
    if kind is not None and kind.__name__ in ("DataFrame", "Series"):
        raise BadJob(
            f"{what} has a {kind.__name__} of {kind.__module__.partition('.')[0]}, wanted arrays",
            remedy="Give its numbers: (frame[features].to_numpy('float32'), frame[target].to_numpy()); or the file "
            "that it came from, as by stoker.data.csv or stoker.data.parquet, with categories and missing values.",
        )


def _require_no_columns(data: Any, what: str) -> None:
    """Raise BadJob for a tuple of lists of numbers, where each list would be taken for one sample."""
    if type(data) is not tuple or len(data) < 2 or not all(type(entry) is list and entry for entry in data):
        return
    if len({len(entry) for entry in data}) == 1:
        names = ["inputs", *(["more"] * (len(data) - 2)), "targets"]
        raise BadJob(
            f"{what} is a tuple of {len(data)} lists of {len(data[0]):,}: a list without arrays is one sample, so that "
            f"there would be {len(data)} samples",
            remedy=f"Give tensors or arrays: ({', '.join(f'torch.tensor({name})' for name in names)}). If these lists "
            f"are samples, give a list of them: {what}=[…].",
        )


def _as_tensor(array: Any, what: str) -> torch.Tensor:
    if "numpy.ma" in sys.modules and np.ma.is_masked(array):  # there is none where nothing has imported that
        raise BadJob(
            f"{what} is an array with masked values, and a tensor has no mask",
            remedy="Say what stands for them: array.filled(…), or leave the samples out.",
        )
    try:
        if isinstance(array, np.ndarray):
            # Reversed and foreign-endian arrays are copied, read-only ones shared: nothing here writes to them.
            native = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                tensor = torch.from_numpy(native)
        else:
            tensor = torch.as_tensor(array).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadJob(f"{what} cannot be a tensor: {error}", remedy="Give numbers, in an array or tensor.") from error
    return widened(tensor, what, is_on_disk=isinstance(array, np.memmap))


def widened(tensor: torch.Tensor, what: str, *, is_on_disk: bool = False) -> torch.Tensor:
    """Unsigned integers beyond uint8, with which PyTorch does not compute, as signed ones of twice the width.

    Those of 64 bits become int64, which holds them up to 9.2e18.

    Raises:
        BadJob: a value is larger; or they are on disk, where another type would bring all of them into memory.
    """
    wider = _WIDER.get(tensor.dtype)
    if wider is None:
        return tensor
    name = str(tensor.dtype).removeprefix("torch.")
    if is_on_disk:
        raise BadJob(f"{what} is a mapped file of {name}, with which PyTorch does not compute", remedy=_IN_ITEMS)
    if tensor.dtype is torch.uint64 and tensor.numel() and int(tensor.numpy().max()) > torch.iinfo(wider).max:
        raise BadJob(
            f"{what} is {name} with values up to {int(tensor.numpy().max()):.3g}, which int64 does not hold",
            remedy="Give smaller numbers, or floats.",
        )
    return tensor.to(wider)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


class SourceSamples(ItemSamples):
    """A source of `stoker.data` that reads files, as stored and where possible by the batch; prepared on the device.

    A collate function of the job receives prepared items instead.
    """

    def __init__(self, source: IndexedSource, collate: Callable[[list[Any]], Any] | None, seed: int) -> None:
        super().__init__(source, collate, seed)
        self.source = source
        self.name = source.name
        self._is_stored = collate is None

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of these samples."""
        rows = self._rows(indices)
        return super().fetch(indices, epoch) if rows is None else rows

    def fetch_drawn(self, indices: Indices, epoch: int, draws: Indices) -> Content:
        """As `fetch`: reading by the batch draws nothing."""
        rows = self._rows(indices)
        return super().fetch_drawn(indices, epoch, draws) if rows is None else rows

    def _rows(self, indices: Indices) -> Content | None:
        try:
            return with_retries(lambda: self.source.rows(indices)) if self._is_stored else None
        except StokerError as error:
            raise BadSample(str(error)) from error

    def read(self, index: int) -> Any:
        """A sample as the source stores it."""
        return self.source.sample(index) if self._is_stored else self.source[index]

    def named(self, index: int) -> str:
        """Its name in the source."""
        return self.source.sample_id(index)

    def collate(self, items: list[Any], indices: Indices | None = None) -> Content:
        """A batch of items, a tuple where each of them is one."""
        content = super().collate(items, indices)
        return tuple(content) if self._is_stored and isinstance(items[0], tuple) else content

    def fingerprint(self) -> str:
        """The source's own."""
        return self.source.fingerprint

    def prepare(self, content: Content) -> Content:
        """As the source does."""
        return self.source.prepare(content) if self._is_stored else content

    def all_of(self, key: Any) -> torch.Tensor | None:
        """The labels of all samples, if `key` is the target and the source has classes."""
        labels = self.source.labels() if key in (self.source.target, None, -1) else None
        return None if labels is None else torch.from_numpy(np.array(labels))
