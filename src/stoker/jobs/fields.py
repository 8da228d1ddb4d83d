"""The entries of a Job's samples: what goes into the model, what is the target, and how samples become a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import BadJob, BadSetting, nearest

TARGETS = ("target", "label", "labels", "y")
"""Default names of a sample's target: the first of these that it has."""


@dataclass(frozen=True)
class Fields:
    """The entries of a sample, by keys of a dict or indices of a tuple.

    Args:
        inputs: which go into the model (default: the first; of a dict, all but the target).
        target: which is the target (default: the last of a tuple; `target`, `label`, `labels` or `y` of a dict).
        collate: makes a batch of a list of samples (map-style datasets; default: PyTorch's).

    Raises:
        BadSetting: one is no key, index or function.
    """

    inputs: str | int | Sequence[str | int] | None = None
    target: str | int | None = None
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        inputs: Any = self.inputs
        is_list = isinstance(inputs, Sequence) and len(inputs) > 0 and all(isinstance(key, str | int) for key in inputs)
        entry = "wanted a key or an index of an entry"
        if not (inputs is None or isinstance(inputs, str | int) or is_list):
            raise BadSetting(f"Fields(inputs=…): {entry}, or several, got {inputs!r}")
        if not (self.target is None or isinstance(self.target, str | int)):
            several = isinstance(self.target, Sequence)
            remedy = "Put several into a dict, {'x': …, 'target': {'a': …, 'b': …}}, or give a loss(model, batch)."
            raise BadSetting(f"Fields(target=…): {entry}, got {self.target!r}", remedy=remedy if several else None)
        if not (self.collate is None or callable(self.collate)):
            raise BadSetting(f"Fields(collate=…): wanted a function of samples, got a {type(self.collate).__name__}")

    def target_of(self, content: Any) -> Any:
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

    def left_out(self, content: Any) -> list[int]:
        """The places in a batch of entries of a tuple that by default neither the model nor the loss is given.

        PyTorch's collate function makes a list of them.
        """
        if self.inputs is not None or not isinstance(content, tuple | list):
            return []
        target = len(content) - 1 if self.target is None else _place(self.target, content)
        return [place for place in range(1, len(content)) if place != target]

    def call(self, model: Callable[..., Any], content: Any) -> Any:
        """The model's output for a batch: one input by position, several by position (tuple) or by name (dict)."""
        if self.inputs is None and isinstance(content, tuple):
            return model(content[0])
        if isinstance(content, Mapping):
            named = {str(key): content[key] for key in self._input_keys(content)}
            return model(**named) if len(named) > 1 else model(*named.values())
        if isinstance(content, tuple | list):
            return model(*[content[place] for place in self._input_places(content)])
        return model(content)

    def map_inputs(self, content: Any, transform: Callable[[Any], Any]) -> Any:
        """The batch with `transform` applied to its first input."""
        if isinstance(content, Mapping):
            first = self._input_keys(content)[0]
            return {key: transform(item) if key == first else item for key, item in content.items()}
        if isinstance(content, tuple | list):
            place = self._input_places(content)[0]
            return like(content, [transform(item) if at == place else item for at, item in enumerate(content)])
        return transform(content)

    def map_target(self, content: Any, transform: Callable[[Any], Any]) -> Any:
        """The batch with `transform` applied to its target, which it must have."""
        if isinstance(content, Mapping):
            chosen = self._target_key(content)
            return {key: transform(item) if key == chosen else item for key, item in content.items()}
        place = len(content) - 1 if self.target is None else _place(self.target, content)
        return like(content, [transform(item) if at == place else item for at, item in enumerate(content)])

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
                remedy="Name the entries that go into it: Job(fields=stoker.Fields(inputs=…, target=…)).",
            )
        return keys

    def _input_places(self, content: Sequence[Any]) -> list[int]:
        if self.inputs is None:
            return [0]
        places = [self.inputs] if isinstance(self.inputs, str | int) else list(self.inputs)
        return [_place(place, content) for place in places]


def _place(place: str | int, content: Sequence[Any]) -> int:
    names: tuple[str, ...] = getattr(content, "_fields", ())
    if place in names:
        return names.index(str(place))
    if not isinstance(place, int) or not 0 <= place < len(content):
        named = f", called {', '.join(names)}" if names else ""
        raise BadJob(
            f"samples have entries 0 to {len(content) - 1}{named}, there is no {place!r}",
            remedy="Name entries of tuples by their places, as by Fields(inputs=(0, 1), target=2), and those of dicts "
            "and named tuples by their names.",
        )
    return place


def _checked(name: Any, content: Mapping[Any, Any]) -> Any:
    if name not in content:
        raise BadJob(f"samples have no entry {name!r}. {nearest(str(name), map(str, content))}")
    return name


def like(content: Sequence[Any], items: list[Any]) -> Sequence[Any]:
    """`items` as a tuple, with the names of `content` if it has any, or as a list if it is one."""
    if hasattr(content, "_fields"):
        named: Sequence[Any] = type(content)(*items)
        return named
    return items if isinstance(content, list) else tuple(items)
