"""Memory that ran out under a plan: what the next plan on such a device must know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.records.plan import Malloc, Plan

_MALLOC_BY_BYTES: tuple[Malloc, ...] = ("mapped", "default", "retained")
"""From the one that holds least of the system's memory to the one that holds most."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A plan that ran out of memory while it trained.

    `job` identifies what its memory depends on: model, batch, loss, optimiser, the form of a sample. `forecast_bytes`
    is what the plan was expected to need, `reachable_bytes` what the process held or could have got when it failed;
    None where unknown.
    """

    schema: ClassVar[int] = 1
    device_model: str
    torch_version: str
    job: str
    plan: Plan
    run: str
    at: str
    forecast_bytes: float | None = None
    reachable_bytes: int | None = None

    def rules_out(self, plan: Plan) -> bool:
        """Whether `plan` of the same job needs as much on any account: as many samples, saving no more."""
        saves_no_more = (
            plan.checkpointed_blocks <= self.plan.checkpointed_blocks
            and plan.loss_chunks <= self.plan.loss_chunks
            and _MALLOC_BY_BYTES.index(plan.malloc) >= _MALLOC_BY_BYTES.index(self.plan.malloc)
        )
        same_precision = plan.precision == self.plan.precision or plan.precision in ("fp32", "tf32")
        return plan.micro_batch >= self.plan.micro_batch and saves_no_more and same_precision
