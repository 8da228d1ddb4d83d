"""Plans and what is said of them: how a Job is executed, never what it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from stoker.records.device import Precision
from stoker.records.estimate import Estimate

LARGEST_GRADIENT_ERROR = 0.25
"""Relative error of a gradient against fp32 beyond which a reduced precision is not used [fraction].

A third of the spread between gradients of different batches, which on the demo's first weights is 0.65 to 0.77 of the
gradient itself; later it is larger still (docs/log.md).
"""

Loader = Literal["memory", "inline", "workers"]
"""Where batches come from: gathered from arrays in memory, items fetched in the training process, or by workers."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to execute a Job.

    `micro_batch` is the most samples that go through the model at once; an optimiser batch is cut into that many
    (the last may be smaller). `checkpoint_every_s` is the time between checkpoints [s].
    """

    schema: ClassVar[int] = 1
    device: str
    micro_batch: int
    precision: Precision = "fp32"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    optimizer_implementation: Literal["default", "foreach", "fused"] = "default"
    threads: int = 1
    loader: Loader = "memory"
    num_workers: int = 0
    prefetch_batches: int = 2
    checkpoint_every_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("micro_batch", "threads", "prefetch_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_workers < 0 or (self.loader == "workers") != (self.num_workers > 0):
            raise ValueError(f"loader {self.loader!r} does not go with num_workers={self.num_workers}")
        if not self.checkpoint_every_s > 0:
            raise ValueError(f"checkpoint_every_s must be positive, got {self.checkpoint_every_s}")

    def in_words(self) -> str:
        """The choices on one line: `bf16 · micro-batch 512 · channels-last · 2 threads`."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        loader = f"{self.num_workers} loader workers" if self.num_workers else f"{self.loader} loader"
        layout = self.memory_format.replace("_", "-")
        words = [self.precision, f"micro-batch {self.micro_batch}", layout, threads, loader]
        return " · ".join([*words, f"{self.optimizer_implementation} optimiser"])


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a plan will need. `total_s` is training, evaluation and checkpoints together, after planning.

    `peak_bytes` is the resident memory of the whole process on a CPU, allocated memory on a GPU.
    """

    schema: ClassVar[int] = 1
    update_s: Estimate
    samples_per_s: Estimate
    evaluate_s: Estimate
    checkpoint_s: Estimate
    total_s: Estimate
    peak_bytes: Estimate
    total_samples: int
    total_updates: int
    gradient_error: float | None = None
    """Relative error of the gradient against fp32 on real batches [fraction]; None where the plan is fp32."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a plan did on this device in a short trial.

    `update_s` are the times of single updates, data included [s]; `state_bytes` are weights, gradients, optimiser state
    and average; `gradient_error` is the gradient's relative error against fp32 (None where the plan is fp32).
    """

    schema: ClassVar[int] = 1
    plan: Plan
    samples_per_update: int
    update_s: tuple[float, ...]
    evaluate_s_per_sample: float
    peak_bytes: int
    state_bytes: int
    took_s: float
    gradient_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan and its forecast."""

    schema: ClassVar[int] = 1
    plan: Plan
    forecast: Forecast


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A plan that was not chosen, and what it lost by."""

    schema: ClassVar[int] = 1
    plan: Plan
    reason: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The planner's answer: the chosen plan first, why, and what was rejected."""

    schema: ClassVar[int] = 1
    device: str
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    explanation: tuple[str, ...]
    took_s: float

    @property
    def chosen(self) -> Candidate:
        """The plan to run."""
        return self.candidates[0]
