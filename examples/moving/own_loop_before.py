"""A small net learns handwritten digits, by a loop: `python own_loop_before.py`. After: own_loop_after.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from material import digits, net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader(samples: tuple[torch.Tensor, ...], **how: Any) -> DataLoader[Any]:
    """Batches of 64."""
    return DataLoader(TensorDataset(*samples), batch_size=64, **how)


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader[Any]) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for images, labels in batches:
        scores = model(images)
        loss += float(F.cross_entropy(scores, labels, reduction="sum"))
        correct += int((scores.argmax(1) == labels).sum())
        count += len(labels)
    model.train()
    return loss / count, correct / count


def train(model: nn.Module, batches: Any, valid: DataLoader[Any], epochs: int, folder: Path) -> Sequence[float]:
    """Train, keep the best in `folder`, go on from the last epoch that is there; returns the loss of each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: (1 + math.cos(math.pi * at / updates)) / 2)
    first, best, since = 0, 0.0, 0
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / "last.pt"
    if last.exists():
        kept = torch.load(last)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
        first, best, since = kept["epoch"] + 1, kept["best"], kept["since"]
    losses = []
    for epoch in range(first, epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        valid_loss, accuracy = evaluate(model, valid)
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, valid loss {valid_loss:.4f}, accuracy {accuracy:.4f}")
        since = 0 if accuracy > best else since + 1
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), folder / "best.pt")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**state, "epoch": epoch, "best": best, "since": since}, last)
        if since == 5:
            break
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    images, valid, test = digits()
    model, folder = net(), Path("runs/own_loop")
    train(model, loader(images, shuffle=True), loader(valid), 20, folder)
    model.load_state_dict(torch.load(folder / "best.pt"))
    print("test loss {:.4f}, accuracy {:.4f}".format(*evaluate(model, loader(test))))
