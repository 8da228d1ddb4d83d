"""The entries of a batch: model inputs and target, and how a batch is cut into samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stoker.data.files.source import TARGETS
from stoker.errors import BadJob, nearest

Content = Any
"""A batch as its collate function made it: a tensor, or a tuple, list or dict of tensors [B, ...]."""


@dataclass(frozen=True)
class Fields:
    """Keys of a dict or indices of a tuple; None stands for the defaults of `Job`."""

    inputs: str | int | Sequence[str | int] | None = None
    target: str | int | None = None

    def target_of(self, content: Content) -> Any:
        """The target of a batch; None where it has none."""
        if self.target is None and isinstance(content, tuple) and len(content) > 1:
            return content[-1]
        if isinstance(content, Mapping):
            key = self._target_key(content)
            return None if key is None else content[key]
        if isinstance(content, tuple | list):
            if self.target is None:
                return content[-1] if len(content) > 1 else None
            return content[_place(self.target, content)]
        return None

    def call(self, model: Callable[..., Any], content: Content) -> Any:
        """The model's output for a batch: one input by position, several by position (tuple) or by name (dict)."""
        if self.inputs is None and isinstance(content, tuple):
            return model(content[0])
        if isinstance(content, Mapping):
            named = {str(key): content[key] for key in self._input_keys(content)}
            return model(**named) if len(named) > 1 else model(*named.values())
        if isinstance(content, tuple | list):
            return model(*[content[place] for place in self._input_places(content)])
        return model(content)

    def map_inputs(self, content: Content, transform: Callable[[Any], Any]) -> Content:
        """The batch with `transform` applied to its first input."""
        if isinstance(content, Mapping):
            first = self._input_keys(content)[0]
            return {key: transform(item) if key == first else item for key, item in content.items()}
        if isinstance(content, tuple | list):
            place = self._input_places(content)[0]
            return _like(content, [transform(item) if at == place else item for at, item in enumerate(content)])
        return transform(content)

    def map_target(self, content: Content, transform: Callable[[Any], Any]) -> Content:
        """The batch with `transform` applied to its target, which it must have."""
        if isinstance(content, Mapping):
            chosen = self._target_key(content)
            return {key: transform(item) if key == chosen else item for key, item in content.items()}
        place = len(content) - 1 if self.target is None else _place(self.target, content)
        return _like(content, [transform(item) if at == place else item for at, item in enumerate(content)])

    def _target_key(self, content: Mapping[Any, Any]) -> Any:
        if self.target is not None:
            return _checked(self.target, content)
        return next((key for key in TARGETS if key in content), None)

    def _input_keys(self, content: Mapping[Any, Any]) -> list[Any]:
        if self.inputs is not None:
            names = [self.inputs] if isinstance(self.inputs, str | int) else list(self.inputs)
            return [_checked(name, content) for name in names]
        target = self._target_key(content)
        keys = [key for key in content if key != target]
        if not keys:
            raise BadJob(
                f"samples have no entry for the model: all they have is {', '.join(map(repr, content))}",
                remedy="Name the entries that go into it: Job(inputs=…, target=…).",
            )
        return keys

    def _input_places(self, content: Sequence[Any]) -> list[int]:
        if self.inputs is None:
            return [0]
        places = [self.inputs] if isinstance(self.inputs, str | int) else list(self.inputs)
        return [_place(place, content) for place in places]


def _place(place: str | int, content: Sequence[Any]) -> int:
    if not isinstance(place, int) or not 0 <= place < len(content):
        raise BadJob(f"samples have entries 0 to {len(content) - 1}, there is no {place!r}")
    return place


def _checked(name: Any, content: Mapping[Any, Any]) -> Any:
    if name not in content:
        raise BadJob(f"samples have no entry {name!r}. {nearest(str(name), map(str, content))}")
    return name


def map_tensors(content: Content, change: Callable[[torch.Tensor], Any]) -> Content:
    """`content` with `change` applied to every tensor in it; other leaves stay."""
    if isinstance(content, torch.Tensor):
        return change(content)
    if isinstance(content, Mapping):
        return {key: map_tensors(item, change) for key, item in content.items()}
    if isinstance(content, tuple | list):
        return _like(content, [map_tensors(item, change) for item in content])
    return content


def cut(content: Content, start: int, stop: int, size: int) -> Content:
    """Samples start..stop of a batch of `size`: tensors along dimension 0, and lists with one item for each sample.

    Tensors of another length are shared by all samples and stay whole. A tuple has an item for each entry; a list of
    `size` items, or a tuple within another, is assumed to have one for each sample, unless all tensors in it have
    `size` rows: then it, too, has one for each entry.
    """
    return _picked_whole(content, lambda rows: rows[start:stop], size)


def take(content: Content, rows: Sequence[int], size: int) -> Content:
    """Samples `rows`, in that order, of a batch of `size`; entries are distinguished as by `cut`."""
    places = torch.as_tensor(rows)

    def pick(entry: Any) -> Any:
        return entry[places] if isinstance(entry, torch.Tensor) else type(entry)(entry[row] for row in rows)

    return _picked_whole(content, pick, size)


def _picked_whole(content: Content, pick: Callable[[Any], Any], size: int) -> Content:
    if isinstance(content, tuple):
        return _like(content, [_picked(item, pick, size) for item in content])
    return _picked(content, pick, size)


def _picked(content: Content, pick: Callable[[Any], Any], size: int) -> Content:
    if isinstance(content, torch.Tensor):
        return pick(content) if _has_rows(content, size) else content
    if isinstance(content, Mapping):
        return {key: _picked(item, pick, size) for key, item in content.items()}
    if isinstance(content, tuple | list):
        if _is_by_sample(content, size):
            return pick(content)
        return _like(content, [_picked(item, pick, size) for item in content])
    return content


def is_row_of_tensors(content: Content) -> bool:
    """Whether a batch is a plain tuple of tensors, which a `cut` of all samples leaves unchanged."""
    return type(content) is tuple and all(isinstance(item, torch.Tensor) for item in content)


def can_be_cut(content: Content, size: int) -> bool:
    """Whether anything in a batch of `size` samples has an entry for each of them."""
    if isinstance(content, tuple):
        return any(_can_be_cut(item, size) for item in content)
    return _can_be_cut(content, size)


def _can_be_cut(content: Content, size: int) -> bool:
    if isinstance(content, Mapping):
        return any(_can_be_cut(item, size) for item in content.values())
    if isinstance(content, tuple | list):
        return _is_by_sample(content, size) or any(_can_be_cut(item, size) for item in content)
    return isinstance(content, torch.Tensor) and _has_rows(content, size)


def _is_by_sample(items: Sequence[Any], size: int) -> bool:
    if len(items) != size or hasattr(items, "_fields"):
        return False
    tensors = [tensor for tensor in _tensors_of(items) if tensor.dim()]
    return not tensors or not all(_has_rows(tensor, size) for tensor in tensors)


def _has_rows(tensor: torch.Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _tensors_of(content: Content) -> Iterator[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, Mapping | tuple | list):
        for item in content.values() if isinstance(content, Mapping) else content:
            yield from _tensors_of(item)


def _like(content: Sequence[Any], items: list[Any]) -> Sequence[Any]:
    """`items` as a tuple, with the names of `content` if it has any, or as a list if it is one."""
    if hasattr(content, "_fields"):
        named: Sequence[Any] = type(content)(*items)
        return named
    return items if isinstance(content, list) else tuple(items)
