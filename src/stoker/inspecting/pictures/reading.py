"""All samples with pixels, decoded once, on every core: what every check of pictures stands on."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.errors import RunFailed
from stoker.inspecting.checked import Tell
from stoker.inspecting.pictures.pixels import as_rgb, decode
from stoker.inspecting.pictures.signatures import SIGNATURE, Signed, sign
from stoker.inspecting.pictures.spool import Spool
from stoker.inspecting.sources.base import Unit
from stoker.records.cleaning import Finding, SplitFacts

_FEWEST_FOR_PROCESSES = 1500
"""Samples below which starting processes takes longer than decoding."""

_AHEAD = 4
"""Units handed out per process: enough to keep it busy, few enough that results do not pile up."""


@dataclass(frozen=True)
class Survey:
    """Every sample that could be decoded, in the order of its source.

    `labels` and `splits` are places in `classes` and `split_names`, a label is −1 where there is none; `unit` and
    `place` say where the sample can be read again.
    """

    units: Sequence[Unit]
    ids: Sequence[str]
    labels: NDArray[np.int32]
    classes: tuple[str, ...]
    splits: NDArray[np.int16]
    split_names: tuple[str, ...]
    unit: NDArray[np.int32]
    place: NDArray[np.int32]
    signatures: NDArray[Any]
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        """Samples that could be decoded."""
        return len(self.ids)

    def split_name(self, row: int) -> str:
        """The split of a sample."""
        return self.split_names[int(self.splits[row])]

    def label(self, row: int) -> str | None:
        """The label of a sample."""
        code = int(self.labels[row])
        return None if code < 0 else self.classes[code]

    def picture(self, row: int) -> Image.Image:
        """A sample in RGB, decoded again."""
        item = self.units[self.unit[row]].item(int(self.place[row]))
        return as_rgb(decode(item.content, item.suffix).image)

    def facts(self) -> tuple[SplitFacts, ...]:
        """How many samples of each class each split has."""
        found = []
        for code, name in enumerate(self.split_names):
            labels = self.labels[self.splits == code]
            counts = np.bincount(labels[labels >= 0], minlength=len(self.classes))
            classes = {one: int(count) for one, count in zip(self.classes, counts, strict=True) if count}
            found.append(SplitFacts(name=name, num_samples=len(labels), classes=classes))
        return tuple(found)


def survey(units: Sequence[Unit], workers: int, tell: Tell) -> Survey:
    """Decode everything.

    Raises:
        RunFailed: a process that decodes died.
    """
    spool, ids = Spool(SIGNATURE), list[str]()
    labels, splits, unit_of, place = (list[NDArray[Any]]() for _ in range(4))
    findings: list[Finding] = []
    classes: dict[str, int] = {}
    split_codes: dict[str, int] = {}
    total, done = sum(map(len, units)), 0
    for number, (unit, signed) in enumerate(zip(units, _signed(units, workers, total), strict=True)):
        spool.append(signed.signatures)
        ids += signed.ids
        codes = [-1 if one is None else classes.setdefault(one, len(classes)) for one in signed.labels]
        labels.append(np.array(codes, np.int32))
        split = split_codes.setdefault(unit.split, len(split_codes))
        splits.append(np.full(len(signed.ids), split, np.int16))
        unit_of.append(np.full(len(signed.ids), number, np.int32))
        place.append(np.array(signed.places, np.int32))
        findings += signed.findings
        done += len(unit)
        tell("decoding", done, total)
    named, codes_in_order = _in_order_of_names(classes, _joined(labels, np.int32))
    return Survey(
        units=units, ids=ids, labels=codes_in_order, classes=named, splits=_joined(splits, np.int16),
        split_names=tuple(split_codes), unit=_joined(unit_of, np.int32), place=_joined(place, np.int32),
        signatures=spool.rows(), findings=tuple(findings),
    )  # fmt: skip


def _signed(units: Sequence[Unit], workers: int, total: int) -> Iterator[Signed]:
    """Each unit's signatures in order, from as many processes."""
    if workers <= 1 or total < _FEWEST_FOR_PROCESSES:
        yield from map(sign, units)
        return
    waiting: deque[Future[Signed]] = deque()
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C is this process's to tell of
    ) as pool:
        try:
            for unit in units:
                waiting.append(pool.submit(sign, unit))
                if len(waiting) >= _AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise RunFailed(
                "A process that decodes images died, of a lack of memory or of an image that its library cannot bear",
                remedy="Free memory and try again with --workers 1; if it dies again, check halves of the folder.",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order_of_names(classes: dict[str, int], labels: NDArray[np.int32]) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Classes sorted, numbers as numbers, and the labels that mean them."""
    named = sorted(classes, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    new = np.full(len(classes) + 1, -1, np.int32)  # the last one is where −1 points to
    for code, name in enumerate(named):
        new[classes[name]] = code
    return tuple(named), new[labels]


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
