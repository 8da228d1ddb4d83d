"""Which columns fill which input. What is not plain is refused, with what to say.

What one row has to hold for each input of a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from stoker.errors import BadJob, nearest
from stoker.predicting.row_source import SourceColumn
from stoker.records import BATCH, Datatype, DynamicDim, Manifest, TensorSpec

Columns = dict[str, tuple[str, ...]]
"""For each input, the column it is read from, or one for each of its elements."""

_NUMBERED = re.compile(r"(.*?)(\d+)")


def parse_mapping(words: Sequence[str]) -> Columns:
    """What `--map INPUT=COLUMN` says; also `x=a,b,c` and `x=x0..x7`.

    Raises:
        BadJob: a word has another form.

    >>> parse_mapping(["x=p0..p3"])
    {'x': ('p0', 'p1', 'p2', 'p3')}
    """
    found: Columns = {}
    for word in words:
        name, equals, columns = word.partition("=")
        if not (name and equals and columns) or name in found:
            raise BadJob(f"--map {word}: wanted INPUT=COLUMN, each input once")
        found[name] = tuple(one for part in columns.split(",") for one in _spread(part.strip()))
    return found


def resolve(
    inputs: Sequence[Input], sources: Mapping[str, Sequence[SourceColumn]], asked: Columns, keep: Sequence[str]
) -> Columns:
    """The columns of each input, the same in every source.

    Without being `asked`, an input is read from the column of its name, or from numbered columns of its name. The only
    input of a model may also be read from the only column that fits, or the only numbered columns, where they stand in
    the order of their numbers.

    Raises:
        BadJob: a column is not there, does not fit, or more than one would do.
    """
    if unknown := sorted(set(asked) - {one.name for one in inputs}):
        raise BadJob(f"The model has no input {unknown[0]!r}", remedy=nearest(unknown[0], [i.name for i in inputs]))
    path, fields = next(iter(sources.items()))
    resolved = {}
    for one in inputs:
        resolved[one.name] = asked.get(one.name) or _found(one, fields, keep, path, is_only=len(inputs) == 1)
    for place, there in sources.items():
        _check(place, {field.name: field for field in there}, inputs, resolved, keep)
    _check_kept_types(sources, keep)
    return resolved


def misfit(field: SourceColumn, one: Input, *, is_element: bool = False) -> str:
    """Why a column cannot fill an input, or one element of it; empty if it can, as far as its type tells."""
    if field.type is None:
        return ""
    sizes, leaf = _list_sizes(field.type)
    is_image = field.is_image or (not sizes and (_is_binary(leaf) or _is_string(leaf) or _is_image_struct(leaf)))
    if one.datatype == "BYTES":
        return "" if _is_string(leaf) or _is_binary(leaf) else f"holds {field.type}, wanted strings"
    if field.is_text:
        return ""
    if is_image and not is_element:
        return "" if one.image else f"holds {field.type}, and no image fits the shape"
    if not (pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_boolean(leaf)):
        return f"holds {field.type}, wanted numbers"
    if is_element:
        return f"holds {field.type}, wanted one number" if sizes else ""
    return _size_misfit(sizes, one)


def _size_misfit(sizes: tuple[int | None, ...], one: Input) -> str:
    if len(sizes) > 1:
        fits = len(sizes) == len(one.shape) and all(
            size is None or isinstance(wanted, str) or size == wanted
            for size, wanted in zip(sizes, one.shape, strict=True)
        )
        return "" if fits else f"has {len(sizes)} levels of lists that do not have this shape"
    known = 1 if not sizes else sizes[0]
    if one.count is None or known is None:
        return "" if sizes or one.count == 1 else "holds one number, wanted lists"
    return "" if known == one.count else f"has {known} numbers a row, wanted {one.count}"


def _found(
    one: Input, fields: Sequence[SourceColumn], keep: Sequence[str], path: str, *, is_only: bool
) -> tuple[str, ...]:
    by_name = {field.name: field for field in fields}
    if one.name in by_name:
        return (one.name,)
    groups = {prefix: names for prefix, names in _numbered(fields).items() if len(names) == one.count}
    for prefix in (one.name, f"{one.name}_", f"{one.name}."):
        if prefix in groups:
            return groups[prefix]
    candidates: list[tuple[str, ...]] = []
    if is_only:
        others = [field for field in fields if field.name not in keep]
        candidates = [(field.name,) for field in others if _may_be_meant(field, one, is_alone=len(others) == 1)]
        candidates += [names for names in groups.values() if len(names) > 1 and _stand_so(names, by_name)]
    if len(candidates) == 1:
        return candidates[0]
    which = "no column" if not candidates else f"{len(candidates)} columns or groups of columns"
    raise BadJob(
        f"{which} of {path} can be taken for the input {one} without guessing; it has: {_some(list(by_name))}",
        remedy=f"Say which: --map {one.name}=COLUMN, or --map {one.name}=FIRST,SECOND,… with one for each element.",
    )


def _may_be_meant(field: SourceColumn, one: Input, *, is_alone: bool) -> bool:
    """Whether a column that is named otherwise could be the input."""
    if field.type is None or (field.is_text and one.count != 1):
        return is_alone
    if _is_string(field.type) and not field.is_image and not field.is_text and one.datatype != "BYTES":
        return is_alone and not misfit(field, one)
    return not misfit(field, one)


def _stand_so(names: Sequence[str], header: Iterable[str]) -> bool:
    """Whether columns stand in this order: a model that was trained on a table took `p1, p10, p2` as they stood."""
    return [name for name in header if name in set(names)] == list(names)


def _numbered(fields: Sequence[SourceColumn]) -> dict[str, tuple[str, ...]]:
    """Columns whose names are one prefix and the numbers from 0 or 1 on, by prefix."""
    groups: dict[str, dict[int, str]] = {}
    for field in fields:
        if found := _NUMBERED.fullmatch(field.name):
            groups.setdefault(found[1], {})[int(found[2])] = field.name
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
    for one in inputs:
        names = columns[one.name]
        if len(names) > 1 and len(names) != one.count:
            raise BadJob(f"{len(names)} columns are given for the input {one}, which takes {one.count or 'any number'}")
        for name in names:
            if problem := misfit(fields[name], one, is_element=len(names) > 1):
                raise BadJob(f"The column {name!r} of {place} does not fit the input {one}: it {problem}")


def _check_kept_types(sources: Mapping[str, Sequence[SourceColumn]], keep: Sequence[str]) -> None:
    for name in keep:
        types = {str(field.type) for fields in sources.values() for field in fields if field.name == name}
        if len(types) > 1:
            raise BadJob(
                f"The column {name!r} has several types: {', '.join(sorted(types))}",
                remedy="Do not keep it, or predict the files one by one.",
            )


def _spread(word: str) -> list[str]:
    """`p0..p3` as its names, anything else as it is.

    Raises:
        BadJob: it counts down, and so names nothing.
    """
    first, dots, last = word.partition("..")
    begin, end = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if not (dots and begin and end and begin[1] == end[1]):
        return [word]
    if int(begin[2]) > int(end[2]):
        raise BadJob(f"--map {word} counts down and names no column", remedy=f"Write {last}..{first}.")
    width = len(begin[2]) if begin[2].startswith("0") else 0
    return [f"{begin[1]}{number:0{width}d}" for number in range(int(begin[2]), int(end[2]) + 1)]


def _list_sizes(kind: pa.DataType) -> tuple[tuple[int | None, ...], pa.DataType]:
    """The sizes of nested lists, None where they vary, and the type of what is in them."""
    sizes: list[int | None] = []
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
    return tuple(sizes), kind


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_image_struct(kind: pa.DataType) -> bool:
    """As data sets of images are often stored: `{bytes, path}`."""
    return bool(pa.types.is_struct(kind)) and kind.get_field_index("bytes") >= 0


def _some(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"


_CHANNELS = (1, 3)


@dataclass(frozen=True)
class ImageShape:
    """An input that images fit: channels, and the size where it is fixed [pixels]."""

    channels: int
    height: int | None
    width: int | None
    channels_last: bool
    has_channel_dim: bool


@dataclass(frozen=True)
class Input:
    """An input as one row fills it: its shape without the batch; named dimensions lie within `dims`."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]
    pad: float | None
    dims: tuple[DynamicDim, ...] = ()

    @property
    def count(self) -> int | None:
        """Elements of a row; None where rows may differ."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        return math.prod(sizes) if len(sizes) == len(self.shape) else None

    @property
    def image(self) -> ImageShape | None:
        """How an image fits, None where it does not, or where it could be taken in two ways."""
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
    """The inputs of a model, as rows fill them."""
    return tuple(_input_of(spec, manifest) for spec in manifest.inputs)


def sample_shape(spec: TensorSpec, manifest: Manifest) -> tuple[int | str, ...]:
    """The shape of what belongs to one row."""
    return spec.shape[1:] if manifest.is_batched else spec.shape


def most_rows(manifest: Manifest) -> int | None:
    """The largest batch that the model takes; None without a limit."""
    if not manifest.is_batched:
        return 1
    return next((dim.high for dim in manifest.dims if dim.name == BATCH), None)


def _input_of(spec: TensorSpec, manifest: Manifest) -> Input:
    shape = sample_shape(spec, manifest)
    dims = tuple(dim for dim in manifest.dims if dim.name in shape)
    return Input(spec.name, spec.datatype, shape, spec.pad, dims)


def _fixed(size: int | str) -> int | None:
    return size if isinstance(size, int) else None
