"""How samples of different lengths are put together: settings of a Job, carried out in `loading/`.

What: bucketing puts samples of like length into one batch, so that little is padded; packing lays several samples into
one row of fixed length, so that next to nothing is. Both change which samples meet in a batch, so they belong to the
Job. Use when: lengths differ much. Costs: every length has to be known before the first update.
Does not combine with: streams, and drawing with replacement (`sampling`).
Source: Krell et al. 2021, https://arxiv.org/abs/2107.02027, for packing and its masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import BadJob
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.sampling import Sampling, as_array

LengthOf = Callable[[Any], int] | Sequence[int]
"""The length of a sample, or all lengths."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrangement:
    """What bucketing and packing have in common; see `bucketed` and `packed`."""

    length_of: Any = None

    def __post_init__(self) -> None:
        if self.length_of is not None and not callable(self.length_of):
            object.__setattr__(self, "length_of", as_array(self.length_of, "lengths"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucketed(Arrangement):
    """Samples of like length in a batch; see `bucketed`."""

    window: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("window", self.window)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed(Arrangement):
    """Several samples in a row; see `packed`."""

    into: int
    pad: float = 0
    ignored: float = -100

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("into", self.into)


def bucketed(*, length_of: LengthOf | None = None, window: int = 50) -> Bucketed:
    """Batches of samples that are about as long as one another; every sample still comes once an epoch.

    The epoch's keyed order is cut into windows of `window` batches; each is sorted by length and cut into batches,
    which come in a keyed order of their own. The batch that the epoch leaves over stays the last.

    Args:
        length_of: a function of a sample, or one length for each sample of `data` (default: the first dimension of its
            first entry). A function reads every sample once when the job is made ready.
        window: batches that are sorted together; 1 leaves batches as they would be.

    Raises:
        BadJob: `window` is no positive whole number.
    """
    return Bucketed(length_of=length_of, window=window)


def packed(into: int, *, length_of: LengthOf | None = None, pad: float = 0, ignored: float = -100) -> Packed:
    """Rows of `into` tokens with as many samples in each as fit; a sample is never split.

    The job's samples are then rows: `batch` and `until` count them. A row has the sample's entries one after the
    other, `position_ids`, which begin at 0 with each sample, and `segment_ids`, which count them from 1; what is left
    of the row is padding, with the segment 0. `valid` and `test` are packed likewise.

    Args:
        into: tokens in a row.
        length_of: a function of a sample, or one length for each sample of `data` (default: the first dimension of its
            first entry). A function reads every sample once when the job is made ready.
        pad: what fills up entries that go into the model.
        ignored: what fills up the target, so that the loss does not count it.

    Raises:
        BadJob: `into` is no positive whole number.
    """
    return Packed(length_of=length_of, into=into, pad=pad, ignored=ignored)


def problem_with(sampling: object, lengths: object, batch: object, collate: object) -> tuple[str, str] | None:
    """The field of a Job that cannot be meant, and what is wrong with it; None where all is well."""
    if sampling is not None and not isinstance(sampling, Sampling):
        return "sampling", f"wanted stoker.sampling.balanced(), weighted(…) or stratified(), got {sampling!r}"
    if lengths is not None and not isinstance(lengths, Arrangement):
        return "lengths", f"wanted stoker.lengths.bucketed(…) or packed(…), got {lengths!r}"
    if sampling is not None and lengths is not None:
        return "lengths", "samples that are bucketed or packed come once an epoch each; leave out sampling"
    if isinstance(lengths, Packed) and collate is not None:
        return "collate", "packed rows are of one length, and stacked as they are; leave it out, or lengths"
    if isinstance(lengths, Bucketed) and type(batch) is not int and not isinstance(batch, TokenBatch):
        wanted = "samples are bucketed by batches, so that the batch is a number or stoker.tokens(…)"
        return "lengths", f"{wanted}, got {batch!r}"
    return None


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadJob(f"{name} is a whole number, 1 or more, got {value!r}")
