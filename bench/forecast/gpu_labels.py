"""One published measurement of a whole step: a row of `labels.csv`, read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_MODES = {"inf": False, "train": True}
_ABSENT = {"", "nan", "none", "null"}
"""What spreadsheets and data frames write where nothing is."""
_JUDGED_ON = {
    ("tesla v100 pcie 32gb", "bert_large", 512, 2),
    ("tesla v100 pcie 32gb", "bert_large", 512, 8),
    ("tesla v100 pcie 32gb", "gpt2_large", 1024, 1),
}
"""The training labels that `gpu_forecast.SlowAllocator` was judged from: device, model, tokens, batch."""


def normalised(name: str) -> str:
    """A device's name without the ways in which files spell it."""
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())


@dataclass(frozen=True, kw_only=True)
class Label:
    """What was measured: `batch` sequences of `tokens` through a model, `layers` deep where the label says so.

    `seconds` is the whole step's time, `forward_s` and `backward_s` those of its halves (None: not told) [s].
    """

    device: str
    model: str
    is_training: bool
    tokens: int
    batch: int
    is_compiled: bool
    layers: int | None
    seconds: float
    forward_s: float | None
    backward_s: float | None

    @classmethod
    def of(cls, row: Mapping[str, str | None]) -> Label:
        """A row, read.

        Raises:
            LookupError: something is missing, or cannot be modelled; the text says what.
            ValueError: a number is none, or is out of range.
        """
        option = _text(row, "option") or ""
        if option not in {"", "fusion"}:
            raise LookupError(f"option {option!r}: several devices are not modelled")
        mode = _needed(row, "mode")
        if mode not in _MODES:
            raise LookupError(f"mode {mode!r} is neither inf nor train")
        milliseconds = _milliseconds(row, "e2e_ms")
        if milliseconds is None:
            raise ValueError(f"measured {row.get('e2e_ms')!r} ms is no time")
        forward, backward = (_milliseconds(row, f"{phase}_ms") for phase in ("forward", "backward"))
        return cls(
            device=normalised(_needed(row, "device")),
            model=_needed(row, "model"),
            is_training=_MODES[mode],
            tokens=_count("seqlen", _needed(row, "seqlen")),
            batch=_count("batch", _needed(row, "batch")),
            is_compiled=option == "fusion",
            layers=_layers(_text(row, "num_layer")),
            seconds=milliseconds * 1e-3,
            forward_s=None if forward is None else forward * 1e-3,
            backward_s=None if backward is None else backward * 1e-3,
        )

    @property
    def is_judged_on(self) -> bool:
        """Whether a constant of the forecast was judged from this very label."""
        if self.device == "tesla t4":  # of `gpu_times._RECOVERY`
            return True
        return self.is_training and (self.device, self.model, self.tokens, self.batch) in _JUDGED_ON


def _text(row: Mapping[str, str | None], key: str) -> str | None:
    text = (row.get(key) or "").strip()
    return None if text.lower() in _ABSENT else text


def _needed(row: Mapping[str, str | None], key: str) -> str:
    text = _text(row, key)
    if text is None:
        raise LookupError(f"{key} is missing")
    return text


def _count(what: str, text: str) -> int:
    """A whole number of at least 1, also where a data frame wrote it as `512.0`."""
    number = float(text)
    if not number.is_integer() or number < 1:
        raise ValueError(f"{what} {text!r} is no whole number of at least 1")
    return int(number)


def _layers(text: str | None) -> int | None:
    """None where the label leaves the depth to the model, which the published files also write as 0."""
    return None if text is None or float(text) == 0 else _count("num_layer", text)


def _milliseconds(row: Mapping[str, str | None], key: str) -> float | None:
    """A positive time; None where there is none, which the published files also write as 0."""
    number = float(_text(row, key) or "0")
    return number if math.isfinite(number) and number > 0 else None
