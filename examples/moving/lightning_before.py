"""A small net learns handwritten digits, by Lightning: `python lightning_before.py`. After: lightning_after.py."""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from material import digits, net
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """What is learned, and how a step goes."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.net, self.lr = net(), lr

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean loss of a micro-batch."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Loss and accuracy."""
        self._evaluate("valid", batch)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Loss and accuracy."""
        self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        scores = self.net(images)
        accuracy = (scores.argmax(1) == labels).float().mean()
        self.log_dict({f"{split}_loss": F.cross_entropy(scores, labels), f"{split}_accuracy": accuracy})

    def configure_optimizers(self) -> Any:
        """AdamW, its rate falling along a cosine with every update."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        updates = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(epochs: int, **others: Any) -> lightning.Trainer:
    """Two micro-batches an update, clipped; stops early, keeps the best."""
    callbacks = [
        EarlyStopping("valid_loss", patience=3),
        ModelCheckpoint(monitor="valid_accuracy", mode="max"),
        LearningRateMonitor("step"),
    ]
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "logger": CSVLogger("runs")}
    return lightning.Trainer(max_epochs=epochs, callbacks=callbacks, **{**settings, **others})


def loader(samples: tuple[torch.Tensor, ...], **how: Any) -> DataLoader[Any]:
    """Micro-batches of 32."""
    return DataLoader(TensorDataset(*samples), batch_size=32, **how)


if __name__ == "__main__":
    lightning.seed_everything(0)
    train, valid, test = digits()
    model, trains = Classifier(), trainer(epochs=20)
    trains.fit(model, loader(train, shuffle=True), loader(valid))
    trains.test(model, loader(test), ckpt_path="best")
