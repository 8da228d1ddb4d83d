"""The entries of a batch, and how a batch is cut into samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stoker.jobs.fields import like

Content = Any
"""A batch as its collate function made it: a tensor, or a tuple, list or dict of tensors [B, ...]."""


class SampleList(list[Any]):
    """A list in a batch that has an item for each sample, where its items do not show it."""


class SampleTuple(tuple[Any, ...]):
    """A tuple in a batch that has an item for each sample, where its items do not show it."""

    __slots__ = ()


def with_sample_lists(content: Content, size: int, of_one_more: Callable[[], Content | None]) -> Content:
    """A batch of `size` samples whose lists of doubtful form are a `SampleList` if they have an item for each sample.

    Doubtful is a list of `size` items whose tensors all have `size` rows: boxes of images that have as many boxes as
    the batch has images, or one tensor [B, ...] for each of B entries. `of_one_more` collates a sample more, with which
    the first of these grows and the second does not; it is called only where something is doubtful. Without its answer
    (None) the batch stays as it is.
    """
    if isinstance(content, tuple):
        is_doubtful = any(_is_doubtful(entry, size) for entry in content)
    else:
        is_list_of_all = isinstance(content, list) and len(content) == size  # such as [images, labels] of two samples
        is_doubtful = is_list_of_all or _is_doubtful(content, size)
    if not is_doubtful:
        return content
    larger = of_one_more()
    if isinstance(content, tuple):
        if not isinstance(larger, tuple) or len(larger) != len(content):
            return content
        return like(content, [_with_sample_lists(item, more, size) for item, more in zip(content, larger, strict=True)])
    return _with_sample_lists(content, larger, size)


def _with_sample_lists(content: Content, larger: Content, size: int) -> Content:
    if type(content) is not type(larger):
        return content
    if isinstance(content, Mapping):
        return {key: _with_sample_lists(item, larger.get(key), size) for key, item in content.items()}
    if not isinstance(content, tuple | list) or hasattr(content, "_fields"):
        return content
    if len(content) != len(larger):
        return _by_sample(content) if len(content) == size else content
    return like(content, [_with_sample_lists(item, more, size) for item, more in zip(content, larger, strict=True)])


def _by_sample(items: Sequence[Any]) -> Sequence[Any]:
    return SampleList(items) if isinstance(items, list) else SampleTuple(items)


def _is_doubtful(content: Content, size: int) -> bool:
    if isinstance(content, Mapping):
        return any(_is_doubtful(item, size) for item in content.values())
    if not isinstance(content, tuple | list) or hasattr(content, "_fields"):
        return False
    tensors = [tensor for tensor in tensors_of(content) if tensor.dim()]
    is_one = len(content) == size and bool(tensors) and all(_has_rows(tensor, size) for tensor in tensors)
    return is_one or (len(content) != size and any(_is_doubtful(item, size) for item in content))


def tensors_of(content: Content) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in the order of `map_tensors`."""
    if isinstance(content, torch.Tensor):
        return [content]
    if isinstance(content, Mapping):
        content = list(content.values())
    return [tensor for item in content for tensor in tensors_of(item)] if isinstance(content, tuple | list) else []


def map_tensors(content: Content, change: Callable[[torch.Tensor], Any]) -> Content:
    """`content` with `change` applied to every tensor in it; other leaves stay."""
    if isinstance(content, torch.Tensor):
        return change(content)
    if isinstance(content, Mapping):
        return {key: map_tensors(item, change) for key, item in content.items()}
    if isinstance(content, tuple | list):
        items = like(content, [map_tensors(item, change) for item in content])
        return _by_sample(items) if isinstance(content, SampleList | SampleTuple) else items
    return content


def not_by_sample(content: Content, size: int, larger: Content, larger_size: int) -> list[str]:
    """Places of tensors that grow with a batch, and have not one row for each sample, as nodes of graphs end to end.

    `cut` would leave them whole. Compared are batches of two sizes. What grows by padding alone, such as the positions
    [T] of samples [B, T], is not among them: the parts of a batch are as long as the whole.
    """
    sizes = (size, larger_size)
    pairs = _pairs(content, larger, sizes, "", is_row=isinstance(content, tuple))
    by_row = {place: _has_rows(one, size) and _has_rows(other, larger_size) for place, one, other in pairs}
    lengths = {
        length
        for place, one, other in pairs
        if by_row[place]
        for length in zip(one.shape[1:], other.shape[1:], strict=False)
        if length != sizes
    }

    def is_padded(one: torch.Tensor, other: torch.Tensor) -> bool:
        grown = [length for length in zip(one.shape, other.shape, strict=False) if length[0] != length[1]]
        return one.dim() == other.dim() and lengths.issuperset(grown)

    return [place or "the batch" for place, one, other in pairs if not (by_row[place] or is_padded(one, other))]


def _pairs(
    content: Content, larger: Content, sizes: tuple[int, int], place: str, *, is_row: bool = False
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """The tensors of two batches that are not lists of samples, by their place."""
    if isinstance(content, torch.Tensor) and isinstance(larger, torch.Tensor):
        return [(place, content, larger)]
    if isinstance(content, Mapping) and isinstance(larger, Mapping):
        items = [(repr(key), item, larger[key]) for key, item in content.items() if key in larger]
    elif isinstance(content, tuple | list) and isinstance(larger, tuple | list) and len(content) == len(larger):
        is_of_samples = not is_row and _is_by_sample(content, sizes[0])
        items = [] if is_of_samples else [(str(at), *pair) for at, pair in enumerate(zip(content, larger, strict=True))]
    else:
        return []
    return [found for at, one, other in items for found in _pairs(one, other, sizes, f"{place}[{at}]" if place else at)]


def cut(content: Content, start: int, stop: int, size: int) -> Content:
    """Samples start..stop of a batch of `size`: tensors along dimension 0, and lists with one item for each sample.

    Tensors of another length are shared by all samples and stay whole. A tuple has an item for each entry; a list of
    `size` items, or a tuple within another, is assumed to have one for each sample, unless all tensors in it have
    `size` rows: then it, too, has one for each entry. A `SampleList` has one for each sample.
    """
    return picked(content, lambda rows: rows[start:stop], size)


def take(content: Content, rows: Sequence[int], size: int) -> Content:
    """Samples `rows`, in that order, of a batch of `size`; entries are distinguished as by `cut`."""
    places = torch.as_tensor(rows)

    def pick(entry: Any) -> Any:
        return entry[places] if isinstance(entry, torch.Tensor) else like(entry, [entry[row] for row in rows])

    return picked(content, pick, size)


def picked(content: Content, pick: Callable[[Any], Any], size: int) -> Content:
    """A batch of `size` with `pick` applied to every entry that has rows for its samples; see `cut`."""
    if isinstance(content, tuple):
        return like(content, [_picked(item, pick, size) for item in content])
    return _picked(content, pick, size)


def _picked(content: Content, pick: Callable[[Any], Any], size: int) -> Content:
    if isinstance(content, torch.Tensor):
        return pick(content) if _has_rows(content, size) else content
    if isinstance(content, Mapping):
        return {key: _picked(item, pick, size) for key, item in content.items()}
    if isinstance(content, tuple | list):
        if _is_by_sample(content, size):
            return pick(content)
        return like(content, [_picked(item, pick, size) for item in content])
    return content


def is_row_of_tensors(content: Content) -> bool:
    """Whether a batch is a plain tuple of tensors, which a `cut` of all samples leaves unchanged."""
    return type(content) is tuple and all(isinstance(item, torch.Tensor) for item in content)


def can_be_cut(content: Content, size: int) -> bool:
    """Whether anything in a batch of `size` samples has an entry for each of them."""
    entries: list[Any] = []
    picked(content, entries.append, size)
    return bool(entries)


def _is_by_sample(items: Sequence[Any], size: int) -> bool:
    if isinstance(items, SampleList | SampleTuple):
        return True
    has_lists = any(isinstance(item, SampleList | SampleTuple) for item in items)
    if has_lists or len(items) != size or hasattr(items, "_fields"):
        return False
    tensors = [tensor for tensor in tensors_of(items) if tensor.dim()]
    return not tensors or not all(_has_rows(tensor, size) for tensor in tensors)


def _has_rows(tensor: torch.Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size
