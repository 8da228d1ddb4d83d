"""Rows of a table, with numbers and words in them: `stoker train examples/data_table.py --set path=customers.csv`.

The file has the columns age, income, city and bought, as in `42,38000,Bern,yes`; some ages are missing.
"""

import torch
from torch import nn

import stoker


class Customers(nn.Module):
    """Two numbers and a city to scores of the classes."""

    def __init__(self, num_cities: int, num_classes: int) -> None:
        super().__init__()
        self.city = nn.Embedding(num_cities, 4)
        self.layers = nn.Sequential(nn.Linear(2 + 4, 32), nn.ReLU(), nn.Linear(32, num_classes))
        self.register_buffer("scale", torch.tensor([1 / 50, 1 / 50_000]))  # years and francs, to about 1

    def forward(self, features: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Features [B, 2] and the city's number [B, 1] to [B, classes]."""
        return self.layers(torch.cat([features * self.scale, self.city(categories[:, 0])], dim=1))


def job(path: str, epochs: float = 20) -> stoker.Job:
    """What is learned from the table; a fifth of each class is for validation."""
    table = stoker.data.csv(
        path, features=["age", "income"], categories=["city"], target="bought", missing={"age": "mean"}
    )
    train, valid, _ = table.split(valid=0.2)
    num_cities, num_classes = len(table.categories["city"]), len(table.classes)
    return stoker.Job(
        model=lambda: Customers(num_cities, num_classes),
        data=train,
        valid=valid,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.AdamW(lr=1e-3),
        batch=32,
        until=stoker.epochs(epochs),
    )
