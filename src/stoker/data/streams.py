"""A stream with its length and the blocks it is shuffled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.errors import BadJob


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
                remedy="Give an object whose __iter__ begins anew, such as a torch.utils.data.IterableDataset.",
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
