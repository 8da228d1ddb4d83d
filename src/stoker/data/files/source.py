"""A source of samples that lie in files: known by its index, read sample by sample or by the batch.

`sample` gives one as it is stored (images as bytes of pixels), `prepare` turns a batch of such into what a model takes,
on the device the batch is on; augmentation goes between the two. `source[i]` is a prepared sample, so that a source is
also a map-style PyTorch dataset.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from stoker.data.files.dividing import Division, divide
from stoker.errors import BadJob

Indices: TypeAlias = npt.NDArray[np.int64]
Labels: TypeAlias = npt.NDArray[np.int64]

TARGETS = ("target", "label", "labels", "y")
"""The entries of a sample that are its target where nobody says which is: the first of these that is there."""

_FEW_CLASSES = 10
"""Whole numbers without names are classes if there are no more of them than this, or so many samples of each."""


class IndexedSource(ABC):
    """Samples fetched by index.

    Attributes:
        name: what errors and reports call it.
    """

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
        """What changes when the data, or how they are read, do."""

    @abstractmethod
    def sample(self, index: int) -> Any:
        """Sample `index` (from 0) as it is stored: a tuple or dict.

        Raises:
            BadJob: it cannot be read; the text names its file.
        """

    @abstractmethod
    def sample_id(self, index: int) -> str:
        """What sample `index` is called in a clean list, and in errors."""

    @property
    def classes(self) -> tuple[str, ...]:
        """What the values of the labels are called, in order; empty where they have no names."""
        return self._classes

    @property
    def target(self) -> str | int | None:
        """The entry of a sample that is its label, a key of a dict or a place in a tuple; None where none is."""
        return self._target

    @property
    def note(self) -> str | None:
        """Something the user should be told about the data, in one line."""
        return None

    @property
    def num_classes(self) -> int | None:
        """How many values the labels take; None where that is not known."""
        return len(self.classes) or None

    def rows(self, indices: Indices) -> Any:
        """The batch of the samples `indices` [B] as stored, where that is faster than one by one; else None."""
        return None

    def labels(self) -> Labels | None:
        """The label of every sample [N], where labels are classes; else None."""
        return None

    def prepare(self, batch: Any) -> Any:
        """A batch as stored [B, ...] as a model takes it; the batch given stays as it is."""
        return batch

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, prepared; a negative index counts from the end."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"{self.name} has {length:,} samples, there is no sample {index}")
        prepared = self.prepare(_mapped(self.sample(index % length), _as_batch))
        return _mapped(prepared, lambda leaf: leaf[0])

    def split(self, *, valid: float = 0.0, test: float = 0.0, stratify: bool = True, seed: int = 0) -> Splits:
        """The samples in parts, drawn by the samples' own names: a few that come or go move few others.

        Args:
            valid: share for validation.
            test: share for testing.
            stratify: of each class the same share, where labels are classes. Whole numbers without names that hardly
                repeat (more than ten of them, and more than one in ten samples) are amounts, and no classes.
            seed: another one draws others.

        Raises:
            BadJob: shares that leave nothing for training, or a part that would be empty.
        """
        names = [self.sample_id(index) for index in range(len(self))]
        found = divide(names, self._strata() if stratify else None, {"valid": valid, "test": test}, seed)
        return Splits(*(self._part(name, found) for name in ("train", "valid", "test")))

    def _strata(self) -> Labels | None:
        """The classes that every part gets its share of.

        By amounts, a part would have those alone that several samples share: others stay in `train`.
        """
        labels = self.labels()
        if labels is None or self.classes:
            return labels
        return labels if len(np.unique(labels)) <= max(_FEW_CLASSES, len(labels) // _FEW_CLASSES) else None

    def _part(self, name: str, division: Division) -> Part | None:
        if name not in division.parts:
            return None
        stated = f"{self.name}, split with seed {division.seed}: {division.in_words(self.classes)}"
        return Part(self, division.parts[name], name, division.rule(name), stated if name == "train" else None)


@final
class Part(IndexedSource):
    """Some samples of another source, in its order."""

    def __init__(self, whole: IndexedSource, indices: Indices, what: str, rule: str, note: str | None = None) -> None:
        super().__init__(f"{whole.name}[{what}]", classes=whole.classes, target=whole.target)
        self.whole = whole
        self.indices = indices
        self._rule = rule
        self._note = note

    def __len__(self) -> int:
        """Number of samples in the part."""
        return len(self.indices)

    @property
    def fingerprint(self) -> str:
        """The whole's, and which part of it this is, by the rule and by number."""
        return f"{self.whole.fingerprint} {self._rule} {digest_of_parts(self.indices.tobytes())}"

    @property
    def note(self) -> str | None:
        """How the whole was divided, and what is to be told of it."""
        notes = [note for note in (self._note, self.whole.note) if note is not None]
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
        """Those of the part's samples."""
        labels = self.whole.labels()
        return None if labels is None else labels[self.indices]

    def prepare(self, batch: Any) -> Any:
        """As the whole does."""
        return self.whole.prepare(batch)


class Splits(NamedTuple):
    """A source in parts; one that was not asked for is None."""

    train: Part | None
    valid: Part | None
    test: Part | None


def digest_of_parts(*parts: bytes | str | Iterable[str]) -> str:
    """SHA-256 of the parts as "sha256:…", each with its length before it, so that none runs into another."""
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
    """Refuse a word that is not one of `known`.

    Raises:
        BadJob: it is not.
    """
    if given not in known:
        raise BadJob(f"{what}: {given!r} is not known", remedy=f"Give one of {', '.join(known)}.")


def class_names(given: Sequence[str]) -> tuple[str, ...]:
    """Names of classes, or of the values of a category, in the order of their numbers.

    Raises:
        BadJob: two have one name, so that one of them would have no samples.
    """
    names = tuple(map(str, given))
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise BadJob(f"{twice!r} is named twice among {len(names):,} classes or values", remedy="Name each once.")
    return names


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
