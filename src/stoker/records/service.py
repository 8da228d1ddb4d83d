"""How a model is served: what `stoker bench-serve` finds and a server loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MOST_DELAY_S, MOST_DEADLINE_S = 3600.0, 86_400.0
MOST_LISTED, MOST_NUMBER = 1000, 10**9 - 1
_MOST = {
    "instances": 1024, "threads": 1024, "max_batch_rows": 65_536, "max_queue_rows": 10**9, "max_queue_bytes": 2**50,
}  # fmt: skip
"""Above these a number is a slip or an attack: threads that no system starts, a batch that no memory holds."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """How one model of a repository is served; lies beside its versions as `service.json`.

    None leaves a choice to the server. `instances` run batches at the same time, each with `threads` threads.
    A batch has at most `max_batch_rows` samples; a request waits for others at most `max_delay_s` while an instance is
    idle, and not where it is alone. What waits has at most `max_queue_rows` and `max_queue_bytes`. `deadline_s` is for
    requests that state none. One caller with an API key may hold `max_caller_share` of that, so that it cannot fill the
    queue alone.
    `buckets` are the sizes that varying dimensions are padded to; empty: to the largest in the batch.
    `versions` are those to serve; empty: the newest. With `allow_nan` inputs may have NaN and infinities; None: only if
    those that the model was checked with do.
    """

    schema: ClassVar[int] = 1
    instances: int | None = None
    threads: int | None = None
    max_batch_rows: int = 32
    max_delay_s: float = 0.0
    max_queue_rows: int = 1024
    max_queue_bytes: int = 256 * 1024 * 1024
    max_caller_share: float = 1.0
    deadline_s: float | None = None
    buckets: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    allow_nan: bool | None = None
    basis: str = ""
    """Where these were measured, in words; empty where nobody measured them."""

    def __post_init__(self) -> None:
        """Refuse numbers no server can follow."""
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} must be from 1 to {most:,}, got {value:,}")
        if not 0 <= self.max_delay_s <= MOST_DELAY_S:
            raise ValueError(f"max_delay_s must be from 0 to {MOST_DELAY_S:g}, got {self.max_delay_s}")
        if self.deadline_s is not None and not 0 < self.deadline_s <= MOST_DEADLINE_S:
            raise ValueError(f"deadline_s must be above 0 and at most {MOST_DEADLINE_S:g}, got {self.deadline_s}")
        if not 0 < self.max_caller_share <= 1:
            raise ValueError(f"max_caller_share must be above 0 and at most 1, got {self.max_caller_share}")
        for name in ("buckets", "versions"):
            values = getattr(self, name)
            if len(values) > MOST_LISTED:
                raise ValueError(f"{name} has {len(values):,} numbers, at most {MOST_LISTED} are taken")
            if any(not 1 <= value <= MOST_NUMBER for value in values):
                raise ValueError(f"{name} must each be from 1 to {MOST_NUMBER:,}, got {str(list(values))[:80]}")
