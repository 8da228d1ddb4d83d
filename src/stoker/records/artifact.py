"""An exported model: its inputs and outputs, and the proofs that it computes what it should."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from stoker.records.progress import FileDigest

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
"""Types of elements, as the Open Inference Protocol names them; BYTES are strings of any length."""

EngineName = str
"""Name of an engine: of a file in `stoker.engines` with a record `ENGINE`; or `torch`, which no artifact is run by."""

ServingPrecision = Literal["fp32", "bf16", "fp16", "int8", "int8+bf16"]
"""Precision of an engine; always stated, never left to the engine.

The parts of an int8 graph that are not quantised are computed in fp32, or in bf16 with `+bf16`.
"""

_MOST_SHOWN, _MOST_LISTED = 40, 12
"""Longest word in an error [characters], and most known words in it."""

BATCH = "batch"
"""The name of the dimension that samples are stacked in; always the first."""


@dataclass(frozen=True, kw_only=True)
class InputColumn:
    """A column of a table that an element of an input is read from, as the model was trained with it.

    `words` are the values of a category in the order of their numbers; empty for a column of numbers. An empty value
    became `missing` in training, or `missing_word` in a category; None: training had none.
    """

    name: str
    words: tuple[str, ...] = ()
    missing: float | None = None
    missing_word: str | None = None

    def number_of(self, word: str | None) -> int:
        """The number of a category's word; an empty one, or None, is `missing_word`.

        Raises:
            ValueError: training had no such word; the text follows the column's name.

        >>> InputColumn(name="city", words=("Bern", "Rom"), missing_word="Rom").number_of(None)
        1
        """
        if not word and (word is None or word not in self._numbers):
            if self.missing_word is None:
                raise ValueError("is empty")
            word = self.missing_word
        number = self._numbers.get(word)
        if number is None:
            few = ", ".join(repr(_cut_off(known)) for known in self.words[:_MOST_LISTED])
            more = f", … ({len(self.words):,} in all)" if len(self.words) > _MOST_LISTED else ""
            raise ValueError(f"is {_cut_off(word)!r}, a word that training did not have; known: {few}{more}")
        return number

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def _cut_off(word: str) -> str:
    return word if len(word) < _MOST_SHOWN else f"{word[: _MOST_SHOWN - 1]}…"


@dataclass(frozen=True, kw_only=True)
class InputColumns:
    """The columns that entries of a job's samples are read from, element by element, by key or index of the entry."""

    schema: ClassVar[int] = 1
    entries: dict[str, tuple[InputColumn, ...]]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An input or output.

    `shape` has a number for a fixed dimension and a name for one that may vary (`("batch", 3, 224, 224)`,
    `("batch", "tokens")`); equal names have equal sizes in one request. `pad` is what an input is filled up with along
    its named dimensions, so that samples of several sizes share a batch; None: samples of one size alone do. `columns`
    are those of a table that an input's elements were read from in training, one each; empty where there was no table.
    """

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]
    pad: float | None = None
    columns: tuple[InputColumn, ...] = ()

    @property
    def takes_words(self) -> bool:
        """True if every element is a category, so that words can be given in place of numbers."""
        return bool(self.columns) and all(column.words for column in self.columns)


@dataclass(frozen=True, kw_only=True)
class DynamicDim:
    """A dimension that varies, and the sizes it may have, both ends included; without `high` there is no limit."""

    name: str
    low: int = 1
    high: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Allowed difference of two answers to one request: |a - b| <= absolute + relative × |b|, of every element.

    Whole numbers, which name classes or tokens, must be equal.
    """

    absolute: float
    relative: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A check, its error and the allowed limit, in the unit that `what` names."""

    what: str
    error: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class ArtifactSource:
    """Where an artifact came from: a run, a live module, an ONNX file, or another artifact; and its SHA-256."""

    kind: Literal["run", "module", "onnx", "artifact"]
    name: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """An exported model, in the directory of one version; written last, so that without one there is no artifact.

    `graph` is the file that the engine loads. `golden` is a safetensors file with inputs (`in.NAME`) and the outputs
    that they gave (`out.NAME`); a service asks for these before it answers anyone. Outputs that have a named dimension
    of a padded input are cut back to what was asked. `labels` names the classes of an output, by the output's name.
    `proved_on` is the CPU or GPU the proofs hold for. `notes` say in words what to know of how it was made.
    `takes_prepared` says whether inputs are samples as the job's data source prepares them, or as it stores them; None
    for models of no job.
    """

    schema: ClassVar[int] = 1
    name: str
    engine: EngineName
    precision: ServingPrecision
    graph: str
    golden: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: tuple[DynamicDim, ...] = ()
    tolerance: Tolerance
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    proofs: tuple[Proof, ...] = ()
    notes: tuple[str, ...] = ()
    takes_prepared: bool | None = None
    proved_on: str
    source: ArtifactSource
    libraries: dict[str, str] = field(default_factory=dict)
    made_at: str
    files: tuple[FileDigest, ...]

    @property
    def is_batched(self) -> bool:
        """True if samples can be stacked: every input and output begins with the batch."""
        return all(spec.shape[:1] == (BATCH,) for spec in (*self.inputs, *self.outputs))
