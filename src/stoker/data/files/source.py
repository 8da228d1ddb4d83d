"""The interface of sources of samples in files, their splits, streams, and what the sources share.

`sample` returns one sample as stored (images as bytes of pixels); `prepare` turns a batch of these into the model's
input, on the batch's device; augmentation goes between the two. `source[i]` is a prepared sample, so that a source is
also a map-style PyTorch dataset. Splits are drawn from names and labels alone, without reading samples.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, final, overload

import numpy as np
import numpy.typing as npt

from stoker.errors import BadJob
from stoker.records import InputColumn

Indices: TypeAlias = npt.NDArray[np.int64]
Labels: TypeAlias = npt.NDArray[np.int64]

_FEW_CLASSES = 10
"""Whole numbers without names are classes if there are at most this many, or this many samples of each."""


class IndexedSource(ABC):
    """Samples fetched by index.

    Attributes:
        name: its name in errors and reports.
        form: the conversion of images, an `ImageForm`; None where there are none.
        reads_labels: whether `labels` reads every sample.
    """

    form: Any = None
    reads_labels = False

    def __init__(self, name: str, *, classes: tuple[str, ...] = (), target: str | int | None = None) -> None:
        self.name = name
        self._classes = classes
        self._target = target

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identity of the data and of how they are read."""

    @abstractmethod
    def sample(self, index: int) -> Any:
        """Sample `index` (from 0) as stored: a tuple or dict.

        Args:
            index: from 0 to below the number of samples.

        Raises:
            BadJob: it cannot be read; the text names its file.
        """

    @abstractmethod
    def sample_id(self, index: int) -> str:
        """Name of sample `index` in a clean list and in errors."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels' values, in order; empty where they have none."""
        return self._classes

    @property
    def encoding(self) -> Mapping[str, Sequence[object]]:
        """The meaning of the numbers in samples, in their order, by what they number; a job's sets must agree in it."""
        images = {} if self.form is None else {"image mean": self.form.mean, "image std": self.form.std}
        return {"class": self.classes, **images}

    @property
    def input_columns(self) -> Mapping[str | int, tuple[InputColumn, ...]]:
        """The columns of a table that entries of a sample are read from, element by element, by key or index."""
        return {}

    @property
    def target(self) -> str | int | None:
        """The entry of a sample that is its label: a key of a dict or an index of a tuple; None if there is none."""
        return self._target

    @property
    def note(self) -> str | None:
        """A line for the user about the data, or None."""
        return None

    @property
    def note_on_parts(self) -> str | None:
        """A line for the user where a part of the samples is set aside, or None."""
        return None

    @property
    def num_classes(self) -> int | None:
        """Number of values of the labels; None if not known."""
        return len(self.classes) or None

    def rows(self, indices: Indices) -> Any:
        """The batch of the samples `indices` [B] as stored, if faster than one by one; else None.

        Args:
            indices: int64 [B], each from 0 to below the number of samples.
        """
        return None

    def labels(self) -> Labels | None:
        """The label of every sample [N], where labels are classes; else None. Read once."""
        return self._labels

    @cached_property
    def _labels(self) -> Labels | None:
        return None

    def prepare(self, batch: Any) -> Any:
        """The model's input from a stored batch [B, ...], which is not changed."""
        return batch

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, prepared; a negative index counts from the end."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"{self.name} has {length:,} samples, there is no sample {index}")
        prepared = self.prepare(_mapped(self.sample(index % length), _as_batch))
        return _mapped(prepared, lambda leaf: leaf[0])

    def split(self, *, valid: float = 0.0, test: float = 0.0, stratify: bool = True, seed: int = 0) -> Splits:
        """The samples in parts, drawn by their names: adding or removing a few samples moves few others.

        Args:
            valid: share for validation.
            test: share for testing.
            stratify: draw the same share of each class, if labels are classes. Whole numbers without names that hardly
                repeat (more than ten of them, and more than one in ten samples) are amounts, not classes.
            seed: of the draw.

        Raises:
            BadJob: shares that leave nothing for training, or a part that would be empty.
        """
        names = [self.sample_id(index) for index in range(len(self))]
        labels = self.labels() if stratify else None
        if labels is not None and not self.classes:
            # Amounts are no strata: a part would get only those that several samples share.
            is_class = len(np.unique(labels)) <= max(_FEW_CLASSES, len(labels) // _FEW_CLASSES)
            labels = labels if is_class else None
        division = divide(names, labels, {"valid": valid, "test": test}, seed)
        stated = f"{self.name}, split with seed {seed}: {division.in_words(self.classes)}"
        parts = {
            name: Subset(self, indices, name, division.rule(name), stated if name == "train" else None)
            for name, indices in division.parts.items()
        }
        return Splits(parts["train"], parts.get("valid"), parts.get("test"))


@final
class Subset(IndexedSource):
    """Some samples of another source, in its order."""

    def __init__(self, whole: IndexedSource, indices: Indices, what: str, rule: str, note: str | None = None) -> None:
        super().__init__(f"{whole.name}[{what}]", classes=whole.classes, target=whole.target)
        self.whole = whole
        self.indices = indices
        self.reads_labels = whole.reads_labels
        self._rule = rule
        self._note = note

    def __len__(self) -> int:
        """Number of samples in the part."""
        return len(self.indices)

    @property
    def fingerprint(self) -> str:
        """The whole's fingerprint with the rule of the part and a digest of its indices."""
        return f"{self.whole.fingerprint} {self._rule} {digest_of_parts(self.indices.tobytes())}"

    @property
    def note(self) -> str | None:
        """The division of the whole, and the whole's own note."""
        on_parts = self.whole.note_on_parts if self._note else None
        notes = [note for note in (self._note, on_parts, self.whole.note) if note is not None]
        return "; ".join(notes) or None

    def sample(self, index: int) -> Any:
        """Sample `index` of the part."""
        return self.whole.sample(int(self.indices[index]))

    def sample_id(self, index: int) -> str:
        """Its name in the whole."""
        return self.whole.sample_id(int(self.indices[index]))

    def rows(self, indices: Indices) -> Any:
        """As the whole does."""
        return self.whole.rows(self.indices[indices])

    def labels(self) -> Labels | None:
        """The labels of the part's samples."""
        labels = self.whole.labels()
        return None if labels is None else labels[self.indices]

    def prepare(self, batch: Any) -> Any:
        """As the whole does."""
        return self.whole.prepare(batch)

    @property
    def encoding(self) -> Mapping[str, Sequence[object]]:
        """The whole's."""
        return self.whole.encoding

    @property
    def input_columns(self) -> Mapping[str | int, tuple[InputColumn, ...]]:
        """The whole's."""
        return self.whole.input_columns


class Splits(NamedTuple):
    """A source in parts; a part without a share is None."""

    train: Subset | None
    valid: Subset | None
    test: Subset | None


@dataclass(frozen=True, eq=False)
class StreamSource:
    """Samples read one after the other; see `stream` and `shuffled`."""

    source: Any
    length: int | None = None
    buffer: int | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.source, "__iter__") or hasattr(self.source, "__next__"):
            raise BadJob(
                f"a {type(self.source).__name__} cannot be read from its beginning again and again",
                remedy="Give an object whose __iter__ starts over, such as a torch.utils.data.IterableDataset.",
            )
        for name in ("length", "buffer"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if value is not None and not is_count:
                raise BadJob(f"{name} is a number of samples, 1 or more, got {value!r}")


def stream(source: Any, *, length: int | None = None) -> StreamSource:
    """A stream of `length` samples an epoch, for a source that does not say how many it has.

    Args:
        source: an object whose `__iter__` starts over each time, such as an IterableDataset.
        length: samples in an epoch; any beyond them are not read.

    Raises:
        BadJob: `source` can be read only once, or `length` is no positive whole number.
    """
    return StreamSource(source, length)


def shuffled(source: Any, *, buffer: int, length: int | None = None) -> StreamSource:
    """A stream whose samples are shuffled in blocks of `buffer`, by keys: the same in a run that was resumed.

    Blocks follow one another, and each is held in memory; a sample moves by fewer than `buffer` places.

    Args:
        source: an object whose `__iter__` starts over each time.
        buffer: samples in a block.
        length: samples in an epoch, where the source does not say.

    Raises:
        BadJob: `source` can be read only once, or a number is not positive and whole.
    """
    return StreamSource(source, length, buffer)


def digest_of_parts(*parts: bytes | str | Iterable[str]) -> str:
    """SHA-256 of the parts as "sha256:…", each preceded by its length, so that none runs into another."""
    state = hashlib.sha256()
    for part in parts:
        pieces = [part] if isinstance(part, bytes | str) else [*part]
        for piece in pieces:
            data = piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogateescape")
            state.update(f"{len(data)}:".encode())
            state.update(data)
        state.update(b";")
    return f"sha256:{state.hexdigest()}"


def require_choice(what: str, given: object, known: Sequence[str]) -> None:
    """Raise BadJob if `given` is not one of `known`."""
    if given not in known:
        raise BadJob(f"{what}: {given!r} is not known", remedy=f"Give one of {', '.join(known)}.")


def class_names(given: Sequence[str]) -> tuple[str, ...]:
    """Names of classes, or of the values of a category, in the order of their numbers.

    Raises:
        BadJob: a name is given twice, so that one of the classes would have no samples.
    """
    names = tuple(map(str, given))
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise BadJob(f"{twice!r} is named twice among {len(names):,} classes or values", remedy="Name each once.")
    return names


def stated_classes(data: Any) -> tuple[str, ...]:
    """Names of the targets' numbers in order, as a job's data states them; none where it does not.

    A dataset as those of torchvision keeps the names of what it stores: with a `target_transform` they are not those of
    its targets. Several names of one class, as ImageNet has, become one.

    >>> from types import SimpleNamespace
    >>> stated_classes(SimpleNamespace(classes=["cat", ("dog", "hound")]))
    ('cat', 'dog, hound')
    >>> stated_classes(SimpleNamespace(classes=["cat", "dog"], target_transform=lambda target: 1 - target))
    ()
    """
    classes = getattr(data, "classes", None)
    if not isinstance(classes, list | tuple | np.ndarray) or getattr(data, "target_transform", None) is not None:
        return ()
    return tuple(", ".join(map(str, name)) if isinstance(name, list | tuple) else str(name) for name in classes)


def _as_batch(leaf: Any) -> Any:
    """A batch of one: what PyTorch's collate function makes of it."""
    import torch

    if isinstance(leaf, torch.Tensor):
        return leaf[None]
    if isinstance(leaf, bool | int | float):
        return torch.tensor([leaf])
    return [leaf]


def _mapped(content: Any, change: Callable[[Any], Any]) -> Any:
    """A sample or a batch, each entry changed."""
    if isinstance(content, Mapping):
        return {key: change(entry) for key, entry in content.items()}
    if isinstance(content, tuple):
        return tuple(change(entry) for entry in content)
    return change(content)


_LISTED = 10
"""With more classes than this, only the smallest and the largest size are listed."""


@dataclass(frozen=True)
class Division:
    """The indices of every part, ascending; `train` is the rest."""

    parts: dict[str, npt.NDArray[np.int64]]
    shares: dict[str, float]
    labels: npt.NDArray[np.int64] | None
    seed: int

    def rule(self, part: str) -> str:
        """The rule that draws the part from the whole, for its fingerprint."""
        shares = " ".join(f"{name}={share:g}" for name, share in self.shares.items())
        kind = "stratified" if self.labels is not None else "unstratified"
        return f"[{part} of {shares} {kind} seed={self.seed}]"

    def in_words(self, classes: Sequence[str]) -> str:
        """The size of every part, and of its classes: `train 8 (cat 4, dog 4), valid 2 (cat 1, dog 1)`."""
        return ", ".join(
            f"{name} {len(indices):,}{self._of_classes(indices, classes)}" for name, indices in self.parts.items()
        )

    def _of_classes(self, indices: npt.NDArray[np.int64], classes: Sequence[str]) -> str:
        if self.labels is None:
            return ""
        known = np.unique(self.labels)
        counts = {int(label): int(np.count_nonzero(self.labels[indices] == label)) for label in known}
        if len(known) > _LISTED:
            return f" ({min(counts.values()):,} to {max(counts.values()):,} of each of {len(known)} classes)"
        named = {label: classes[label] if 0 <= label < len(classes) else str(label) for label in counts}
        return f" ({', '.join(f'{named[label]} {count:,}' for label, count in counts.items())})"


def divide(
    names: Sequence[str], labels: npt.NDArray[np.int64] | None, shares: Mapping[str, float], seed: int
) -> Division:
    """Draw the parts; a sample's part depends on its name, the seed, and the number of samples.

    With `labels` every part gets its share of each class, rounded so that the part's size is right; at least one sample
    of each class stays in `train`.

    Raises:
        BadJob: there are no shares, they leave nothing for training, or a part is empty.
    """
    drawn = {name: share for name, share in shares.items() if share}
    if not drawn or not all(0 < share < 1 for share in drawn.values()) or sum(drawn.values()) >= 1:
        given = ", ".join(f"{name}={share:g}" for name, share in drawn.items()) or "none"
        raise BadJob(
            f"split takes shares between 0 and 1 that leave something for training, got {given}",
            remedy="As in split(valid=0.1, test=0.1).",
        )
    groups = [np.arange(len(names))]
    if labels is not None:
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    order = [_shuffled(names, group, seed) for group in groups]
    taken = [0] * len(order)
    parts: dict[str, npt.NDArray[np.int64]] = {}
    for name, share in drawn.items():
        counts = _counts([len(group) for group in order], taken, share)
        chosen = [group[start : start + count] for group, start, count in zip(order, taken, counts, strict=True)]
        taken = [start + count for start, count in zip(taken, counts, strict=True)]
        parts[name] = np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)
    rest = np.sort(np.concatenate([group[start:] for group, start in zip(order, taken, strict=True)]))
    for name, indices in parts.items():
        if not len(indices):
            raise BadJob(
                f"a share of {drawn[name]:g} of {len(names):,} samples for {name!r} is none",
                remedy="Give a larger share, or data of its own.",
            )
    return Division({"train": rest, **parts}, drawn, labels, seed)


def _shuffled(names: Sequence[str], group: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """The group in the order of its names' keyed digests."""
    keys = [
        hashlib.blake2b(f"{seed} {names[index]}".encode("utf-8", "surrogateescape"), digest_size=16).digest()
        for index in group.tolist()
    ]
    return group[sorted(range(len(group)), key=keys.__getitem__)]


def _counts(sizes: Sequence[int], taken: Sequence[int], share: float) -> list[int]:
    """Samples drawn from each group: the floor of its share, and one more for the largest remainders (Hamilton)."""
    free = [max(0, size - start - 1) for size, start in zip(sizes, taken, strict=True)]
    exact = [size * share for size in sizes]
    counts = [min(int(amount), room) for amount, room in zip(exact, free, strict=True)]
    missing = round(sum(sizes) * share) - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda group: (int(exact[group]) - exact[group], group))
    for group in by_remainder:
        if missing > 0 and counts[group] < free[group]:
            counts[group] += 1
            missing -= 1
    return counts


class Names(Sequence[str]):
    """An immutable sequence of strings, stored as one `bytes` and an array of their ends.

    A list of a million Python strings takes 100 MB, and a forked worker copies each page that it touches, since reading
    counts references.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]  # file names need not be UTF-8
        self.blob = b"".join(encoded)
        self.ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    @classmethod
    def of_parts(cls, blob: bytes, ends: np.typing.NDArray[np.int64]) -> Names:
        """Names from the stored `blob` and `ends`."""
        names = cls(())
        names.blob, names.ends = blob, ends
        return names

    def __len__(self) -> int:
        """Number of names."""
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Names: ...
    def __getitem__(self, index: int | slice) -> str | Names:
        """The name at `index`, from the end if it is negative."""
        if isinstance(index, slice):
            return Names(self[place] for place in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self):,} names, no number {index}")
        index %= len(self)
        start = int(self.ends[index - 1]) if index else 0
        return self.blob[start : int(self.ends[index])].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        """All of them, in order."""
        start = 0
        for end in self.ends.tolist():
            yield self.blob[start:end].decode("utf-8", "surrogateescape")
            start = end


@contextmanager
def needs(package: str, extra: str = "data") -> Iterator[None]:
    """Turn an ImportError within the block into BadJob, which says how to install `package`."""
    try:
        yield
    except ImportError as error:
        raise BadJob(f"{package} is not installed ({error})", remedy=f"pip install 'stoker[{extra}]'") from error
