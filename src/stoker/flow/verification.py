"""Examining the exactness contract for one job."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from stoker import profiling, training, verifying
from stoker.devices import attached_devices, resolve_place
from stoker.errors import RunFailed
from stoker.flow.decision import decide
from stoker.flow.preparation import prepare, users_code
from stoker.flow.starting import stoker_version
from stoker.jobs import Entry, Job
from stoker.records import Position, Verdict
from stoker.stepping import Step
from stoker.store import CheckpointStore


def verify(job: Job, *, on: str = "here", entry: Entry | None = None) -> tuple[Verdict, ...]:
    """Examine what the exactness contract says of this job, under the plan chosen for it here.

    Raises:
        BadJob, DoesNotFit, NoDevice: as for `plan`.
    """
    prepared = prepare(job, entry)
    device = resolve_place(on, attached_devices())
    decision, coupling = decide(prepared, device)
    with TemporaryDirectory(prefix="stoker-verify-") as folder, profiling.threads(decision.chosen.plan.threads):

        def through_checkpoint(saved: Step, fresh: Step) -> None:
            store = CheckpointStore(Path(folder))
            checkpointer = training.Checkpointer(store, spec_digest=prepared.spec.digest(), version=stoker_version())
            checkpointer.save(saved, Position(), {}, best=False)
            written = checkpointer.close()
            found = store.newest()
            if found is None or not written:
                raise RunFailed(f"the checkpoint in {folder} vanished")
            training.restore(fresh, *found)

        with users_code("the model or the loss", entry):
            return verifying.verify(
                prepared.job,
                prepared.data,
                decision.chosen.plan,
                coupling,
                through_checkpoint=through_checkpoint,
                gradient_error=decision.chosen.forecast.gradient_error,
            )
