"""What became of a batch: a record for the metrics, one for every time an engine ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CutReason = Literal["idle", "full", "pace", "shape", "deadline", "delay", "bisect"]
"""Why a batch ended where it did.

- idle: an instance was free and took all that waited
- full: the next request would have gone beyond `max_batch_rows`
- pace: more rows at once were measured to be no faster
- shape: what still waited has other sizes, and padding to them was measured to cost more than it saves
- deadline: with more rows, one of them would have been late
- delay: `max_delay_s` was over before it was full
- bisect: a part of a batch that failed, run again to find the request at fault
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Executed:
    """One run of an engine.

    `sizes` are those that the padded dimensions had. `elements` counts the positions of all samples (tokens, pixels;
    1 for a sample of fixed shape) that were asked for, `padding` those that were added to them. `queue_s` has the
    seconds that each request which this run ended had waited: none where a failed batch is bisected, and run again.
    The three times are those of putting the batch together, of the engine, and of taking its outputs apart.
    """

    instance: int
    rows: int
    requests: int
    reason: CutReason
    sizes: tuple[int, ...]
    elements: int
    padding: int
    queue_s: tuple[float, ...]
    input_s: float
    infer_s: float
    output_s: float
    succeeded: bool
