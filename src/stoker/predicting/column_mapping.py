"""The columns that fill each input of a model. An ambiguous mapping is refused, with the option that settles it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from stoker.data.reading.table_readers import words_of
from stoker.errors import BadJob, nearest
from stoker.predicting.row_source import SourceColumn
from stoker.records import BATCH, Datatype, DynamicDim, InputColumn, Manifest, TensorSpec

Columns = dict[str, tuple[str, ...]]
"""For each input, the column it is read from, or one for each of its elements."""

_NUMBERED = re.compile(r"(.*?)(\d+)")


def parse_mapping(words: Sequence[str]) -> Columns:
    """The columns in `--map INPUT=COLUMN`; also `x=a,b,c` and `x=x0..x7`.

    Raises:
        BadJob: a word has another form.

    >>> parse_mapping(["x=p0..p3"])
    {'x': ('p0', 'p1', 'p2', 'p3')}
    """
    mapping: Columns = {}
    for word in words:
        name, equals, columns = word.partition("=")
        if not (name and equals and columns) or name in mapping:
            raise BadJob(f"--map {word}: wanted INPUT=COLUMN, each input once")
        mapping[name] = tuple(column for part in columns.split(",") for column in _spread(part.strip()))
    return mapping


def resolve(
    inputs: Sequence[Input], sources: Mapping[str, Sequence[SourceColumn]], asked: Columns, keep: Sequence[str]
) -> Columns:
    """The columns of each input, the same in every source.

    By default, an input is read from the columns that it was trained with, from the column of its name, or from
    numbered columns of its name. The only input of a
    model may also be read from the only column that fits, or the only numbered columns, if they are in the order of
    their numbers.

    Raises:
        BadJob: a column is missing, does not fit, or several would.
    """
    if unknown := sorted(set(asked) - {spec.name for spec in inputs}):
        raise BadJob(f"The model has no input {unknown[0]!r}", remedy=nearest(unknown[0], [i.name for i in inputs]))
    path, fields = next(iter(sources.items()))
    resolved = {}
    for spec in inputs:
        resolved[spec.name] = asked.get(spec.name) or _found(spec, fields, keep, path, is_only=len(inputs) == 1)
    for source, columns in sources.items():
        _check(source, {field.name: field for field in columns}, inputs, resolved, keep)
    for name in keep:
        types = {str(field.type) for fields in sources.values() for field in fields if field.name == name}
        if len(types) > 1:
            raise BadJob(
                f"The column {name!r} has several types: {', '.join(sorted(types))}",
                remedy="Do not keep it, or predict the files one by one.",
            )
    return resolved


def misfit(field: SourceColumn, spec: Input, *, is_element: bool = False, is_word: bool = False) -> str:
    """Why a column cannot fill an input, one element of it, or one that is a category, by its type; empty if it can."""
    if field.type is None:
        return ""
    sizes, leaf = _list_sizes(field.type)
    if is_word:
        return f"holds {field.type}, wanted words" if sizes or is_binary(leaf) or not _has_text(leaf) else ""
    is_struct = bool(pa.types.is_struct(leaf)) and leaf.get_field_index("bytes") >= 0  # {bytes, path}, as often stored
    is_image = field.is_image or (not sizes and (is_binary(leaf) or _is_string(leaf) or is_struct))
    if spec.datatype == "BYTES":
        return "" if _is_string(leaf) or is_binary(leaf) else f"holds {field.type}, wanted strings"
    if field.is_text:
        return ""
    if is_image and not is_element:
        return "" if spec.image else f"holds {field.type}, and no image fits the shape"
    if not (pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_boolean(leaf)):
        return f"holds {field.type}, wanted numbers"
    if is_element:
        return f"holds {field.type}, wanted one number" if sizes else ""
    if len(sizes) > 1:
        fits = len(sizes) == len(spec.shape) and all(
            size is None or isinstance(expected, str) or size == expected
            for size, expected in zip(sizes, spec.shape, strict=True)
        )
        return "" if fits else f"has {len(sizes)} levels of lists that do not have this shape"
    known = 1 if not sizes else sizes[0]
    if spec.count is None or known is None:
        return "" if sizes or spec.count == 1 else "holds one number, wanted lists"
    return "" if known == spec.count else f"has {known} numbers a row, wanted {spec.count}"


def _found(
    spec: Input, fields: Sequence[SourceColumn], keep: Sequence[str], path: str, *, is_only: bool
) -> tuple[str, ...]:
    by_name = {field.name: field for field in fields}
    trained = tuple(column.name for column in spec.columns)
    lacking = [name for name in trained if name not in by_name]
    if trained and not lacking:
        return trained
    if spec.name in by_name:
        return (spec.name,)
    if len(lacking) < len(trained):
        raise _lacks(path, lacking[0], spec, by_name)
    groups = {prefix: names for prefix, names in _numbered(fields).items() if len(names) == spec.count}
    for prefix in (spec.name, f"{spec.name}_", f"{spec.name}."):
        if prefix in groups:
            return groups[prefix]
    candidates: list[tuple[str, ...]] = []
    if is_only:
        others = [field for field in fields if field.name not in keep]
        candidates = [(field.name,) for field in others if _may_be_meant(field, spec, is_alone=len(others) == 1)]
        # In the table's order: a model that was trained on a table took `p1, p10, p2` in that order.
        in_order = {names: tuple(name for name in by_name if name in names) for names in groups.values()}
        candidates += [names for names, ordered in in_order.items() if len(names) > 1 and names == ordered]
    if len(candidates) == 1:
        return candidates[0]
    if lacking:
        raise _lacks(path, lacking[0], spec, by_name)
    which = "no column" if not candidates else f"{len(candidates)} columns or groups of columns"
    shown = ", ".join(list(by_name)[:12]) + (f", … ({len(by_name)} in all)" if len(by_name) > 12 else "")
    raise BadJob(
        f"{which} of {path} can be taken for the input {spec} without guessing; it has: {shown}",
        remedy=f"Say which: --map {spec.name}=COLUMN, or --map {spec.name}=FIRST,SECOND,… with one for each element.",
    )


def _lacks(path: str, column: str, spec: Input, fields: Iterable[str]) -> BadJob:
    """The error for a table without a column that the model was trained with."""
    trained = ", ".join(one.name for one in spec.columns)
    return BadJob(
        f"{path} has no column {column!r}, which the model was trained with",
        remedy=f"{nearest(column, fields)} If it has another name: --map {spec.name}=FIRST,SECOND,… for {trained}.",
    )


def _may_be_meant(field: SourceColumn, spec: Input, *, is_alone: bool) -> bool:
    """True if a column with another name could be the input."""
    if field.type is None or (field.is_text and spec.count != 1):
        return is_alone
    if _is_string(field.type) and not field.is_image and not field.is_text and spec.datatype != "BYTES":
        return is_alone and not misfit(field, spec)
    return not misfit(field, spec)


def _numbered(fields: Sequence[SourceColumn]) -> dict[str, tuple[str, ...]]:
    """Columns named by a prefix and consecutive numbers from 0 or 1 on, by prefix."""
    groups: dict[str, dict[int, str]] = {}
    for field in fields:
        if match := _NUMBERED.fullmatch(field.name):
            groups.setdefault(match[1], {})[int(match[2])] = field.name
    return {
        prefix: tuple(names[number] for number in sorted(names))
        for prefix, names in groups.items()
        if sorted(names) in (list(range(len(names))), list(range(1, len(names) + 1)))
    }


def _check(
    place: str, fields: Mapping[str, SourceColumn], inputs: Sequence[Input], columns: Columns, keep: Sequence[str]
) -> None:
    for name in (*(name for names in columns.values() for name in names), *keep):
        if name not in fields:
            raise BadJob(f"{place} has no column {name!r}", remedy=nearest(name, fields))
    for spec in inputs:
        names = columns[spec.name]
        if len(names) > 1 and len(names) != spec.count:
            raise BadJob(
                f"{len(names)} columns are given for the input {spec}, which takes {spec.count or 'any number'}"
            )
        for name, column in zip(names, spec.by_column(names) or (None,) * len(names), strict=True):
            is_element = len(names) > 1 or column is not None
            is_word = column is not None and bool(column.words)
            if problem := misfit(fields[name], spec, is_element=is_element, is_word=is_word):
                raise BadJob(f"The column {name!r} of {place} does not fit the input {spec}: it {problem}")


def _spread(word: str) -> list[str]:
    """The names of `p0..p3`, or the word itself; raises BadJob if it counts down."""
    first, dots, last = word.partition("..")
    begin, end = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if not (dots and begin and end and begin[1] == end[1]):
        return [word]
    if int(begin[2]) > int(end[2]):
        raise BadJob(f"--map {word} counts down and names no column", remedy=f"Write {last}..{first}.")
    width = len(begin[2]) if begin[2].startswith("0") else 0
    return [f"{begin[1]}{number:0{width}d}" for number in range(int(begin[2]), int(end[2]) + 1)]


def _list_sizes(kind: pa.DataType) -> tuple[tuple[int | None, ...], pa.DataType]:
    """The sizes of nested lists, None if they vary, and the type of their elements."""
    sizes: list[int | None] = []
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
    return tuple(sizes), kind


def _has_text(kind: pa.DataType) -> bool:
    try:
        words_of(pa.nulls(0, kind))
    except pa.ArrowException:
        return False
    return True


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Whether a column of this type holds bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


_CHANNELS = (1, 3)


@dataclass(frozen=True)
class ImageShape:
    """An input that images fit: channels, and the fixed sizes [pixels]."""

    channels: int
    height: int | None
    width: int | None
    channels_last: bool
    has_channel_dim: bool


@dataclass(frozen=True)
class Input:
    """An input of one row: its shape without the batch; `dims` bound the named dimensions.

    `columns` are those of a table that its elements were read from in training, or none.
    """

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]
    pad: float | None
    dims: tuple[DynamicDim, ...] = ()
    columns: tuple[InputColumn, ...] = ()

    def by_column(self, names: Sequence[str]) -> tuple[InputColumn, ...]:
        """What training had in the place of each of these columns; none if they are not read as in training.

        A column of the input's own name holds numbers as the model takes them.
        """
        is_own = len(names) == 1 and names[0] == self.name != next((column.name for column in self.columns), "")
        return self.columns if len(names) == len(self.columns) and not is_own else ()

    @property
    def count(self) -> int | None:
        """Number of elements of a row; None if rows may differ."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        return math.prod(sizes) if len(sizes) == len(self.shape) else None

    @property
    def image(self) -> ImageShape | None:
        """How an image fits; None if it does not, or is ambiguous."""
        if len(self.shape) == 2:
            return ImageShape(1, _fixed(self.shape[0]), _fixed(self.shape[1]), False, False)
        if len(self.shape) != 3 or (self.shape[0] in _CHANNELS) == (self.shape[2] in _CHANNELS):
            return None
        if self.shape[0] in _CHANNELS:
            channels, height, width = self.shape
        else:
            height, width, channels = self.shape
        is_last = self.shape[0] not in _CHANNELS
        return ImageShape(int(channels), _fixed(height), _fixed(width), is_last, True)

    def __str__(self) -> str:
        """For messages: `image FP32 [1, 28, 28]`."""
        return f"{self.name} {self.datatype} [{', '.join(map(str, self.shape))}]"


def inputs_of(manifest: Manifest) -> tuple[Input, ...]:
    """The inputs of a model, for one row."""
    shapes = {spec.name: sample_shape(spec, manifest) for spec in manifest.inputs}
    return tuple(
        Input(
            spec.name,
            spec.datatype,
            shapes[spec.name],
            spec.pad,
            tuple(dim for dim in manifest.dims if dim.name in shapes[spec.name]),
            spec.columns,
        )
        for spec in manifest.inputs
    )


def sample_shape(spec: TensorSpec, manifest: Manifest) -> tuple[int | str, ...]:
    """The shape of one row of a tensor."""
    return spec.shape[1:] if manifest.is_batched else spec.shape


def most_rows(manifest: Manifest) -> int | None:
    """The largest batch that the model takes; None without a limit."""
    if not manifest.is_batched:
        return 1
    return next((dim.high for dim in manifest.dims if dim.name == BATCH), None)


def _fixed(size: int | str) -> int | None:
    return size if isinstance(size, int) else None
