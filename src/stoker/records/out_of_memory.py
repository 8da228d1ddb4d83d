"""Memory that ran out under a plan: what the next plan on such a device must know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.records.plan import Plan


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
        same_precision = plan.precision == self.plan.precision or plan.precision in ("fp32", "tf32")
        return (
            plan.micro_batch >= self.plan.micro_batch
            and plan.checkpointed_blocks <= self.plan.checkpointed_blocks
            and same_precision
        )
