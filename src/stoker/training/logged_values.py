"""`stoker.log`: scalars, pictures and texts of a user's own, from a step or a hook, in the run's log and at trackers.

What: values are kept until the run's next event, mostly a `progress`, and then written as one `logged` event, so that
logging in every update costs microseconds. Pictures become PNG files in the run's folder `logged`.
Use when: something is worth a curve that no metric is: a gate, a temperature, a generated picture.
Costs: about 1 µs a scalar; a tensor on a GPU makes the host wait for it.
Does not combine with: captured or compiled passes that contain the call, where Python runs once. Of several processes
the first one's values are kept. A kill may lose those since the last event.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stoker.errors import BadJob
from stoker.records import Event
from stoker.records.codec import JSON
from stoker.store import RunDirectory
from stoker.store.files import make_directories, write_atomic
from stoker.training.evaluation_examples import png_of
from stoker.training.loop import Loop
from stoker.training.telemetry import Sink, emit_event

LOGGED = "logged"
"""The folder of pictures in a run's directory."""

_MOST_CHARS = 20_000
_MOST_SIDE = 1024
"""Pixels of a picture's side; larger ones are thinned."""


def log(
    *,
    scalars: Mapping[str, Any] | None = None,
    images: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    step: int | None = None,
) -> None:
    """Log values of your own from inside a step or a hook: `stoker.log(scalars={"gate": gate.mean()})`.

    `stoker ui` shows them, and trackers receive the scalars. Outside a run, and in processes other than the first,
    nothing happens.

    Args:
        scalars: numbers by name, or tensors of one element.
        images: pictures by name: tensors or arrays [H, W], [1 or 3, H, W] or [H, W, 3]; floats from 0 to 1, or uint8.
        texts: texts by name; at most 20,000 characters of each are kept.
        step: their position [samples]; None: the run's. Within an update that is the position before it.

    Raises:
        BadJob: a value is no number, or no picture; it is named.
    """
    for logger in _active[-1:]:
        logger.take(scalars or {}, images or {}, texts or {}, step)


class RunLogger:
    """Keeps what `log` was given until the next event; a sink, the last of its run."""

    def __init__(self, directory: RunDirectory, sinks: Sequence[Sink]) -> None:
        self._loop: Callable[[], Loop | None] = lambda: None
        self._is_first = True
        self._samples = 0
        self._directory, self._sinks = directory, sinks
        self._scalars: dict[str, list[list[float]]] = {}
        self._images: list[dict[str, JSON]] = []
        self._texts: list[dict[str, JSON]] = []
        self._num_files = 0

    def follow(self, loop: Loop, *, is_first: bool) -> None:
        """Take positions from this loop; where another process `is_first`, drop all values."""
        self._loop, self._is_first = weakref.ref(loop), is_first

    def take(
        self, scalars: Mapping[str, Any], images: Mapping[str, Any], texts: Mapping[str, str], step: int | None
    ) -> None:
        """Keep these values."""
        if not self._is_first:
            return
        loop = self._loop()
        samples = step if step is not None else self._samples if loop is None else loop.reached.samples
        for name, value in scalars.items():
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError) as problem:
                raise BadJob(f"stoker.log: the scalar {name!r} is no number: {problem}") from problem
            self._scalars.setdefault(str(name), []).append([samples, number])
        for name, image in images.items():
            self._images.append({"name": str(name), "samples": samples, "file": self._write(str(name), image, samples)})
        self._texts += [
            {"name": str(name), "samples": samples, "text": str(text)[:_MOST_CHARS]} for name, text in texts.items()
        ]

    def __call__(self, event: Event) -> None:
        """Write what was kept; an event is the occasion."""
        if event.kind != "logged":
            samples = event.fields.get("samples")
            self._samples = samples if isinstance(samples, int) else self._samples
            self.flush()

    def flush(self) -> None:
        """Write what was kept as one event."""
        if not (self._scalars or self._images or self._texts):
            return
        positions = [int(pair[0]) for pairs in self._scalars.values() for pair in pairs]
        positions += [logged["samples"] for logged in (*self._images, *self._texts)]
        fields: dict[str, JSON] = {"samples": max(positions)}
        kept = {"scalars": self._scalars, "images": self._images, "texts": self._texts}
        fields |= {name: values for name, values in kept.items() if values}
        self._scalars, self._images, self._texts = {}, [], []
        emit_event(self._sinks, "logged", **fields)

    def _write(self, name: str, image: Any, samples: int) -> str:
        folder = self._directory.path / LOGGED
        if not folder.exists():
            make_directories(folder)
        self._num_files += 1
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:40]
        file = f"{samples:012d}-{self._num_files:04d}-{slug}.png"
        write_atomic(folder / file, png_of(picture(name, image), (0.0, 1.0)), what=f"the picture {name!r}")
        return file


def picture(name: str, image: Any) -> torch.Tensor:
    """A picture as a tensor [1 or 3, H, W] of floats from 0 to 1.

    Raises:
        BadJob: it has another shape.
    """
    pixels = torch.as_tensor(image).detach().cpu()
    pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
    if pixels.ndim == 2:
        pixels = pixels[None]
    if pixels.ndim == 3 and pixels.shape[0] not in (1, 3) and pixels.shape[-1] in (1, 3):
        pixels = pixels.permute(2, 0, 1)
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3) or 0 in pixels.shape:
        raise BadJob(
            f"stoker.log: the picture {name!r} has the shape {tuple(pixels.shape)}",
            remedy="Give [H, W], [1 or 3, H, W] or [H, W, 3].",
        )
    stride = -(-max(pixels.shape[1:]) // _MOST_SIDE)
    return pixels[:, ::stride, ::stride]


_active: list[RunLogger] = []


@contextmanager
def logging_to(logger: RunLogger) -> Iterator[RunLogger]:
    """Within the block `log` writes to this run."""
    _active.append(logger)
    try:
        yield logger
    finally:
        _active.remove(logger)
        logger.flush()
