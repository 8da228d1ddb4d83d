"""Hugging Face datasets as sources: columns of images, numbers and text become entries of samples."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from stoker.data.files.image_files import ImageForm, image_form
from stoker.data.files.source import IndexedSource, Indices, Labels, digest_of_parts, needs
from stoker.errors import BadJob, nearest
from stoker.jobs.fields import TARGETS

_LISTS = frozenset({"Sequence", "List", "LargeList", "Array2D", "Array3D", "Array4D", "Array5D"})
"""Types of columns whose values are lists."""


@final
class HuggingFace(IndexedSource):
    """Rows of a `datasets.Dataset` as dicts.

    Images are uint8 [C, H, W] (prepared: float32), integers and class labels int64, other numbers float32, lists of
    numbers tensors of these, text as it is. A dataset with a format or transform of its own (`with_format`,
    `set_transform`) gives its rows as that makes them.
    """

    def __init__(self, dataset: Any, columns: tuple[str, ...] | None, target: str | None, form: ImageForm) -> None:
        name = f"{getattr(dataset.info, 'dataset_name', None) or 'dataset'}/{dataset.split or 'all'}"
        known = tuple(dataset.column_names)
        for column in (*(columns or ()), *(() if target is None else (target,))):
            if column not in known:
                raise BadJob(f"{name} has no column {column!r}. {nearest(column, known)}")
        asked = known if columns is None else columns
        chosen = target or next((column for column in TARGETS if column in asked), None)
        self.columns = asked if chosen is None else tuple(dict.fromkeys((*asked, chosen)))
        feature = None if chosen is None else dataset.features[chosen]
        super().__init__(name, classes=tuple(getattr(feature, "names", None) or ()), target=chosen)
        self.form = form
        self._fingerprint = str(dataset._fingerprint)  # noqa: SLF001 - what their library itself identifies data by
        self._has_format = dataset.format["type"] is not None
        if self._has_format and form != image_form(None, 3, "stretch", None, None):
            raise BadJob(
                f"{name} has a format or transform of its own, which makes its images: size, channels, resize, mean "
                "and std would have no effect",
                remedy="Leave them out, or take the format off: dataset.with_format(None).",
            )
        self._kinds = {column: _kind(dataset.features[column]) for column in self.columns}
        self._dtypes = {column: _dtype(dataset.features[column]) for column in self.columns}
        self.dataset = dataset
        if not self._has_format:  # images stay encoded: they are decoded here, as all images are
            import datasets

            self.dataset = dataset.select_columns(list(self.columns))
            for column, kind in self._kinds.items():
                if kind == "image":
                    self.dataset = self.dataset.cast_column(column, datasets.Image(decode=False))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.dataset)

    @property
    def fingerprint(self) -> str:
        """Digest of the library's own fingerprint (of the table and its transforms) and of how it is read."""
        digest = digest_of_parts(self._fingerprint, self.columns, repr(self.form))
        return f"{digest} (of their fingerprint {self._fingerprint})"

    def sample(self, index: int) -> dict[str, Any]:
        """Row `index`."""
        row = self.dataset[index]
        if self._has_format:
            return {name: row[name] for name in self.columns if name in row} or row
        return {name: self._entry(name, row[name], index) for name in self.columns}

    def sample_id(self, index: int) -> str:
        """The row's number."""
        return str(index)

    def rows(self, indices: Indices) -> dict[str, Any] | None:
        """All columns of these rows, from one read of the table; None for a dataset with a format of its own.

        Raises:
            BadJob: a value is missing, or a list of numbers makes no tensor.
        """
        if self._has_format:
            return None
        import torch

        columns = self.dataset[indices.tolist()]
        batch: dict[str, Any] = {}
        for name in self.columns:
            entries: list[Any] = [
                self._entry(name, value, int(row)) for value, row in zip(columns[name], indices, strict=True)
            ]
            if self._kinds[name] == "text":
                batch[name] = entries
            elif self._kinds[name] in ("label", "integer"):
                batch[name] = torch.tensor(entries, dtype=torch.int64)
            elif (
                odd := next((i for i, entry in enumerate(entries) if not isinstance(entry, torch.Tensor)), None)
            ) is not None:
                raise BadJob(
                    f"{name!r} in row {int(indices[odd])} of {self.name} makes no tensor: it has lists of several "
                    "lengths, or values that are no numbers",
                    remedy="Make batches of it with stoker.Fields(collate=…), or name the other columns: "
                    "stoker.data.huggingface(dataset, columns=[…]).",
                )
            elif any(entry.shape != entries[0].shape for entry in entries):
                return None  # the reader of single rows reports which two differ
            else:
                batch[name] = torch.stack(entries)
        return batch

    def prepare(self, batch: Any) -> Any:
        """Images as the form says, the rest as it is."""
        if self._has_format or not isinstance(batch, Mapping):
            return batch
        return {
            name: self.form.prepare(entry) if self._kinds.get(name) == "image" else entry
            for name, entry in batch.items()
        }

    @cached_property
    def _labels(self) -> Labels | None:
        """The target's column, if it holds class labels or integers."""
        if self.target is None or self._kinds.get(str(self.target)) not in ("label", "integer"):
            return None
        with needs("pyarrow"):
            # Their formatter for NumPy makes negative numbers of what int64 does not hold.
            table = self.dataset.with_format("arrow", columns=[self.target])[:]
            column: NDArray[Any] = table[self.target].to_numpy()
        if column.dtype.kind not in "iub":  # nothing among whole numbers makes floats, or objects, of them
            raise self._lacking(str(self.target), int(np.argmax(np.isnan(column.astype(np.float64)))))
        if column.dtype.kind == "u" and column.size:
            _fitting(int(column.max()), f"{self.target!r} in row {int(column.argmax())} of {self.name}")
        return column.astype(np.int64)

    def _entry(self, name: str, value: Any, index: int) -> Any:
        """A value of a column as an entry of a sample."""
        kind = self._kinds[name]
        if value is None:
            raise self._lacking(name, index)
        if kind == "image":
            import torch

            try:
                content = value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
                return torch.from_numpy(self.form.decoded(content))
            except (OSError, ValueError) as error:
                raise BadJob(
                    f"the image {name!r} in row {index} of {self.name} cannot be read: {error}",
                    remedy="Leave the row out with dataset.filter(…) or dataset.select(…).",
                ) from error
        if kind == "numbers":
            return _numbers(value, self._dtypes[name], f"{name!r} in row {index} of {self.name}")
        if kind == "number":
            return _numbers(float(value), self._dtypes[name], name)
        if kind == "integer":  # a truth value is one
            return _fitting(int(value), f"{name!r} in row {index} of {self.name}")
        return value

    def _lacking(self, name: str, index: int) -> BadJob:
        return BadJob(
            f"row {index} of {self.name} has no {name!r}",
            remedy=f"dataset.filter(lambda row: row[{name!r}] is not None) leaves such rows out.",
        )


def huggingface(
    dataset: Any,
    columns: Sequence[str] | None = None,
    *,
    target: str | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    resize: str = "stretch",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> Any:
    """A Hugging Face dataset as a source; for several splits, a dict of sources.

    `Job(data=dataset)` does this by itself, with images in their own size.

    Args:
        dataset: a `datasets.Dataset` or `DatasetDict`; the folder of one that was saved; or a name for their
            `load_dataset`, which may download it.
        columns: the columns of a sample; the target is added. Default: all.
        target: the column of labels, if it is called none of target, label, labels, y; name it to the Job as well.
        size: of images, (height, width), or one number for both; without it all must have one size.
        channels: of images: 1, 3 or 4.
        resize: "stretch", "crop" or "pad".
        mean: subtracted from pixels from 0 to 1, for all channels or each; default 0.
        std: divisor after that; default 1.

    Raises:
        BadJob: the library or a column is missing, or the dataset is a stream.
    """
    form = image_form(size, channels, resize, mean, std)
    loaded = dataset
    if isinstance(dataset, str | Path):
        with needs("datasets", "huggingface"):
            import datasets
        folder = Path(dataset).expanduser()
        is_saved = (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()
        loaded = datasets.load_from_disk(str(folder)) if is_saved else datasets.load_dataset(str(dataset))
    if isinstance(loaded, Mapping):
        return {
            name: huggingface(
                part, columns, target=target, size=size, channels=channels, resize=resize, mean=mean, std=std
            )
            for name, part in loaded.items()
        }
    if not is_huggingface(loaded):
        what = "a stream of theirs" if hasattr(loaded, "take") and not hasattr(loaded, "__len__") else "no such dataset"
        raise BadJob(
            f"stoker.data.huggingface takes a datasets.Dataset; a {type(loaded).__name__} is {what}",
            remedy="Load it without streaming=True, or give a stream to Job(data=…) itself.",
        )
    return HuggingFace(loaded, None if columns is None else tuple(columns), target, form)


def as_source(data: Any) -> Any:
    """A Hugging Face dataset as a source; anything else unchanged.

    Raises:
        BadJob: it is several splits.
    """
    module = sys.modules.get("datasets")
    if module is not None and isinstance(data, module.DatasetDict):
        raise BadJob(
            f"a DatasetDict is several datasets: {', '.join(map(repr, data))}",
            remedy="Give one of them, as in Job(data=dataset['train'], valid=dataset['validation']).",
        )
    return huggingface(data) if is_huggingface(data) else data


def is_huggingface(data: Any) -> bool:
    """True if `data` is a map-style Hugging Face dataset; does not import their library."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(data, module.Dataset)


def _kind(feature: Any) -> str:
    """The kind of a column: image, label, integer, number, numbers, or text."""
    kind = type(feature).__name__
    if kind in {"Image", "ClassLabel"}:
        return "image" if kind == "Image" else "label"
    dtype = _dtype(feature)
    if dtype is None:
        return "text"
    if kind in _LISTS or isinstance(feature, list):
        return "numbers"
    return "integer" if dtype is np.int64 else "number"


def _dtype(feature: Any) -> type[np.int64 | np.float32] | None:
    """The dtype of a column's numbers, or of those in its lists: int64 or float32; None for other columns."""
    while type(feature).__name__ in _LISTS or isinstance(feature, list):
        if hasattr(feature, "shape"):  # Array2D and others, whose dtype is their numbers' dtype
            break
        feature = feature[0] if isinstance(feature, list) else feature.feature
    dtype = str(getattr(feature, "dtype", ""))
    if dtype.startswith(("int", "uint", "bool")):
        return np.int64
    return np.float32 if dtype.startswith(("float", "double", "decimal")) else None


def _numbers(value: Any, dtype: Any, what: str) -> Any:
    """Nested lists of numbers as a tensor of `dtype`; ragged ones, and those with other values, unchanged.

    Raises:
        BadJob: a whole number is too large for int64.
    """
    import torch

    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return value
    if array.dtype.kind == "u" and array.size:
        _fitting(int(array.max()), what)
    return torch.from_numpy(array.astype(dtype)) if array.dtype.kind in "iubf" else value


def _fitting(number: int, what: str) -> int:
    """The number; refused where int64 does not hold it."""
    if number > np.iinfo(np.int64).max:
        raise BadJob(f"{what} has {number}, which int64 does not hold", remedy="Give smaller numbers, or floats.")
    return number
