"""How samples of different lengths form batches: settings of a Job, carried out in `loading/`.

What: bucketing puts samples of similar length into one batch, so that little is padded; packing puts several samples
into one row of fixed length, so that next to nothing is. Both change which samples share a batch, so they belong to the
Job.
Use when: lengths differ much. Costs: every length has to be known before the first update.
Does not combine with: streams, and drawing with replacement (`sampling`).
Source: Krell et al. 2021, https://arxiv.org/abs/2107.02027, for packing and its masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from stoker.errors import BadJob
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.numeric_settings import is_count
from stoker.jobs.sampling import Sampling, as_array


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrangement:
    """Base of bucketing and packing; see `bucketed` and `packed`."""

    length_of: Any = None

    def __post_init__(self) -> None:
        if self.length_of is not None and not callable(self.length_of):
            object.__setattr__(self, "length_of", as_array(self.length_of, "lengths"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucketed(Arrangement):
    """Batches of samples of similar length; every sample still comes once an epoch.

    The epoch's keyed order is cut into windows of `window` batches; each is sorted by length and cut into batches,
    which come in a keyed order of their own. The incomplete batch of an epoch stays the last.

    Args:
        length_of: a function of a sample, or one length for each sample of `data` (default: the first dimension of its
            first entry). A function reads every sample once when the job is resolved.
        window: batches that are sorted together; 1 leaves batches as they would be.

    Raises:
        BadJob: `window` is not a positive integer.
    """

    window: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("window", self.window)


bucketed = Bucketed


@dataclass(frozen=True, eq=False)
class Packed(Arrangement):
    """Rows of `into` tokens with as many samples in each as fit; a sample is never split.

    The job's samples are then rows: `batch` and `until` count them. A row has its samples' entries one after the other,
    `position_ids`, which begin at 0 with each sample, and `segment_ids`, which count them from 1; the rest of the row
    is padding, with the segment 0. `valid` and `test` are packed likewise.

    Args:
        into: tokens in a row.
        length_of: as for `bucketed`.
        pad: padding of entries that go into the model.
        ignored: padding of the target, which the loss does not count.

    Raises:
        BadJob: `into` is not a positive integer.
    """

    into: int
    _: KW_ONLY
    pad: float = 0
    ignored: float = -100

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("into", self.into)


packed = Packed


def length_checks(job: Any) -> Iterator[tuple[str, bool, str]]:
    """Checks of sampling by choice or by length: the field, whether it is valid, and the problem if not."""
    sampling, batch = job.sampling, job.batch
    is_sampling = sampling is None or isinstance(sampling, Sampling | Arrangement)
    ways = (
        "stoker.sampling.balanced(), weighted(…), stratified() or in_order(), stoker.lengths.bucketed(…) or packed(…)"
    )
    own = "An order of your own is that of the data, such as a torch.utils.data.Subset of them, under in_order()"
    got = f"{sampling!r}" if isinstance(sampling, str | int) else f"a {type(sampling).__name__}"
    yield "sampling", is_sampling, f"wanted {ways}, got {got}. {own}"
    is_stacked = not isinstance(sampling, Packed) or job.fields.collate is None
    yield (
        "fields",
        is_stacked,
        "Fields(collate=…): packed rows are of one length, and stacked as they are; leave it out, or lengths",
    )
    is_fixed = type(batch) is int or isinstance(batch, TokenBatch)
    expected = "samples are bucketed by batches, so that the batch is a number or stoker.tokens(…)"
    yield "sampling", is_fixed or not isinstance(sampling, Bucketed), f"{expected}, got {batch!r}"


def _require_count(name: str, value: object) -> None:
    if not is_count(value):
        raise BadJob(f"{name} is a whole number, 1 or more, got {value!r}")
