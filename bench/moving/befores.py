"""The trainings before the move, from examples/moving: driven from given weights over samples in a given order."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples" / "moving"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))


@dataclass
class Curve:
    """The loss of each update, and a clock [s] read once in each, always at the same place."""

    losses: list[float] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)

    def rate(self, batch: int) -> float:
        """Samples a second, from the first reading of the clock to the last."""
        return (len(self.at_s) - 1) * batch / (self.at_s[-1] - self.at_s[0])


Before = Callable[[nn.Module, Sequence[int], Path], Curve]
"""From a model with its initial weights, the samples in their order, and a folder for what is left behind."""


def by_lightning(model: nn.Module, order: Sequence[int], folder: Path) -> Curve:
    """lightning_before.py; its mean of the means of two micro-batches is the loss of an update."""
    import lightning_before as before

    parts = Curve()

    class Recorded(before.Classifier):
        """Keeps the loss of each micro-batch."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            """As ever."""
            parts.at_s.append(time.perf_counter())
            loss = super().training_step(batch, batch_idx)
            parts.losses.append(float(loss.detach()))
            return loss

    module = Recorded()
    module.net.load_state_dict(model.state_dict())
    train, valid, _ = before.digits()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers that such small data do not need
        trainer = before.trainer(1, accelerator="cpu", logger=before.CSVLogger(str(folder)), **quiet)
        trainer.fit(module, before.loader(train, sampler=list(order)), before.loader(valid))
    return _of_updates(parts, 2, lambda pair: sum(pair) / 2)


def by_the_trainer(model: nn.Module, order: Sequence[int], folder: Path) -> Curve:
    """trainer_before.py; a micro-batch's loss is divided by the tokens of the whole update, so that the sum is its."""
    import trainer_before as before

    parts = Curve()

    class Recorded(before.Trainer):  # type: ignore[misc]  # transformers ships no annotations of it
        """Takes samples in the order given, and keeps the loss of each micro-batch."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return list(order)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """As ever."""
            parts.at_s.append(time.perf_counter())
            loss = super().training_step(*args, **kwargs)
            parts.losses.append(float(loss))
            return loss

    tokens = before.source()
    settings = before.arguments(
        1,
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        max_steps=len(order) // 32,
    )
    samples = before.rows(tokens[:1280])
    with contextlib.redirect_stdout(io.StringIO()):
        Recorded(model, settings, train_dataset=samples, eval_dataset=before.rows(tokens[1280:])).train()
    return _of_updates(parts, 2, sum)


def by_own_loop(model: nn.Module, order: Sequence[int], folder: Path) -> Curve:
    """own_loop_before.py."""
    import own_loop_before as before

    curve = Curve()
    train, valid, _ = before.digits()
    batches = _Clocked(before.loader(train, sampler=list(order)), curve)
    with contextlib.redirect_stdout(io.StringIO()):
        curve.losses += before.train(model, batches, before.loader(valid), 1, folder)
    return curve


@dataclass
class _Clocked:
    """Batches, and the clock read when each is handed over."""

    batches: Any
    curve: Curve

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.curve.at_s.append(time.perf_counter())
            yield batch


def _of_updates(parts: Curve, size: int, loss_of: Callable[[Sequence[float]], float]) -> Curve:
    """A curve of updates from one of micro-batches, `size` of which make an update."""
    firsts = range(0, len(parts.losses), size)
    return Curve([loss_of(parts.losses[at : at + size]) for at in firsts], parts.at_s[::size])
