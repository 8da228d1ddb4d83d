"""One run in a process of its own, its updates timed from the start of the process.

    python -m bench.start.run stoker|lightning|lightning_bf16|plain KIND UPDATES FOLDER STARTED OUT

STARTED is the system's monotonic clock when the process was started [s]; OUT is the JSON file of update times [s].
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch

from bench.start.kinds import ALL_KINDS, WEIGHT_DECAY, Kind, loss_of, read


class Clock:
    """Times of updates since the process was started [s]."""

    def __init__(self, started: float) -> None:
        self._started = started
        self.updates: list[float] = []
        self.plans: list[dict[str, object]] = []

    def updated(self) -> None:
        """An update is done; its loss has been looked at, or nothing runs in the background."""
        self.updates.append(time.monotonic() - self._started)


def with_stoker(kind: Kind, folder: Path, clock: Clock) -> None:
    """`stoker.train` as a user calls it; checkpoints, records and the report are written."""
    import stoker  # noqa: PLC0415 - the other contenders do not import it
    from stoker import records  # noqa: PLC0415
    from stoker.training import session  # noqa: PLC0415
    from stoker.training.telemetry import Telemetry  # noqa: PLC0415

    class Timed(Telemetry):
        def updated(self, loss: torch.Tensor, num_samples: int) -> bool:
            clock.updated()
            return super().updated(loss, num_samples)

    session.Telemetry = Timed  # type: ignore[misc]

    def note(event: records.Event) -> None:
        if event.kind == "planned":
            clock.plans.append({"plan": event.fields["plan"], "took_s": event.fields["took_s"]})

    torch.manual_seed(0)
    job = stoker.Job(
        model=kind.model,
        data=read(kind, folder),
        loss=kind.loss,
        batch=kind.batch,
        name=kind.name,
        optimizer=stoker.AdamW(lr=kind.lr, weight_decay=WEIGHT_DECAY),
        until=stoker.updates(kind.updates),
    )
    stoker.train(job, new=True, sink=note)


def with_lightning(kind: Kind, folder: Path, clock: Clock, precision: str = "32-true") -> None:
    """Lightning's Trainer, logger, bar and checkpoints off."""
    import lightning.pytorch as pl  # noqa: PLC0415
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = kind.model()

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return loss_of(kind, self.model(batch[0]), batch[1])

        def on_train_batch_end(self, *_: object) -> None:
            clock.updated()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=kind.lr, weight_decay=WEIGHT_DECAY)

    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=kind.updates,
        max_epochs=-1,
        logger=False,
        precision=precision,  # type: ignore[arg-type]
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(*read(kind, folder)), batch_size=kind.batch, shuffle=True))


def plain(kind: Kind, folder: Path, clock: Clock) -> None:
    """A loop of ten lines in fp32."""
    torch.manual_seed(0)
    model, (inputs, targets) = kind.model(), read(kind, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=kind.lr, weight_decay=WEIGHT_DECAY)
    while len(clock.updates) < kind.updates:
        for rows in torch.randperm(len(inputs)).split(kind.batch):
            optimizer.zero_grad()
            loss_of(kind, model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
            clock.updated()
            if len(clock.updates) == kind.updates:
                return


def main(arguments: list[str]) -> None:
    """Train to the end and write when each update was done."""
    contender, name, updates, folder, started, out = arguments
    kind, clock = dataclasses.replace(ALL_KINDS[name], updates=int(updates)), Clock(float(started))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if contender == "stoker":
        with_stoker(kind, Path(folder), clock)
    elif contender == "plain":
        plain(kind, Path(folder), clock)
    else:
        with_lightning(kind, Path(folder), clock, "bf16-mixed" if contender.endswith("bf16") else "32-true")
    Path(out).write_text(json.dumps({"updates_s": clock.updates, "plans": clock.plans}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
