"""How metrics, quantities and plans are written for people; the page and the terminal share it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from stoker.records import Estimate, Plan
from stoker.records.codec import printable
from stoker.units import format_bytes, format_count, format_rate, format_seconds

LEVEL_MEANINGS = {
    "bit-equal": "a run resumed under its own plan is equal, bit for bit, to one never stopped",
    "same mathematics": "updates are those of any other legal plan, in exact arithmetic",
    "same law": "rounding or the model's own random draws may differ from another plan's; the law they follow does not",
    "none": "nothing is promised about another plan or a resume",
}
"""The promise of each level of the exactness contract."""


def level_meaning(level: str) -> str:
    """The promise of a level, by the words it begins with; empty for an unknown one.

    >>> level_meaning("bit-equal on resume")
    'a run resumed under its own plan is equal, bit for bit, to one never stopped'
    """
    return next((meaning for name, meaning in LEVEL_MEANINGS.items() if level.startswith(name)), "")


_FRACTIONS = ("accuracy", "precision", "recall", "f1", "auc", "iou", "error_rate")


def is_fraction(name: str) -> bool:
    """Whether a metric of this name is a fraction of one, so that it reads best in per cent."""
    return any(word in name.lower() for word in _FRACTIONS)


def are_fractions(name: str, values: Iterable[float]) -> bool:
    """Whether values of a metric are shown in per cent on an axis: one of its own may have this name and go up to 100.

    >>> are_fractions("accuracy", [0.5, 1.0]), are_fractions("accuracy", [50.0]), are_fractions("loss", [0.5])
    (True, False, False)
    """
    return is_fraction(name) and all(0 <= value <= 1 for value in values)


def format_metric(name: str, value: float) -> str:
    """A metric's value: fractions in per cent, all else with four figures.

    >>> format_metric("test/accuracy", 0.92614), format_metric("loss", 0.231449), format_metric("loss", -0.0)
    ('92.61 %', '0.2314', '0')
    """
    if is_fraction(name) and 0 <= value <= 1:
        return f"{100 * value:.2f} %"
    return f"{value:z.4g}" if math.isfinite(value) else str(value)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics on one line, the loss last; of those with a value for each class, the ends.

    >>> format_metrics({"loss": 0.25, "accuracy": 0.9})
    'accuracy 90.00 % · loss 0.25'
    """
    single = {name: value for name, value in metrics.items() if not is_of_class(name)}
    ordered = sorted(single.items(), key=lambda item: item[0].rsplit("/", 1)[-1] == "loss")
    parts = [f"{name} {format_metric(name, value)}" for name, value in ordered]
    return " · ".join([*parts, *_by_class(metrics)])


def is_of_class(name: str) -> bool:
    """Whether a result is that of one class of several: `f1[3]`."""
    return name.endswith("]")


def _by_class(metrics: Mapping[str, float]) -> list[str]:
    """The lowest and the highest value of each metric that has one for each class."""
    values: dict[str, list[float]] = {}
    for name, value in metrics.items():
        if is_of_class(name):
            values.setdefault(name.partition("[")[0], []).append(value)
    return [
        f"{name} by class {format_metric(name, min(of))} to {format_metric(name, max(of))}"
        for name, of in values.items()
    ]


def headline_metric(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """The metric a run is known by: of the test split before others, any before the loss, the first named first.

    The results of single classes come last.

    >>> headline_metric({"valid/accuracy": 0.93, "test/loss": 0.2, "test/accuracy": 0.92})
    ('test/accuracy', 0.92)
    """

    def rank(name: str) -> tuple[bool, bool, bool]:
        return not name.startswith("test/"), is_of_class(name), name.rsplit("/", 1)[-1] == "loss"

    return min(metrics.items(), key=lambda item: rank(item[0]), default=None)


def format_quantity(value: float, unit: str) -> str:
    """A value in the unit of an `Estimate`: seconds, bytes, rates, or a plain number with its unit.

    >>> format_quantity(75.0, "s"), format_quantity(2**30, "bytes"), format_quantity(1357.2, "samples/s")
    ('1 min 15 s', '1.0 GiB', '1,357 samples/s')
    """
    if unit in ("s", "seconds"):
        return format_seconds(value) if value else "0 s"
    if unit in ("bytes", "B"):
        return format_bytes(value)
    if unit.endswith("/s"):
        return format_rate(value, unit.removesuffix("/s"))
    return f"{format_count(value)} {unit}".rstrip()


def format_interval(estimate: Estimate) -> str:
    """The interval of an estimate: `3 min 20 s to 4 min 30 s`, `324 to 366 ms`."""
    low, high = format_quantity(estimate.low, estimate.unit), format_quantity(estimate.high, estimate.unit)
    number, _, unit = low.partition(" ")
    if " " not in unit and high.partition(" ")[2] == unit:
        low = number
    return f"{low} to {high}"


WIDE_INTERVAL = 4.0
"""An interval whose ends differ by more than this factor holds nearly any outcome, so a hit says little."""


def is_wide(estimate: Estimate) -> bool:
    """Whether the interval is so wide that a value inside it says little of the forecast.

    >>> is_wide(Estimate(value=2.0, low=1.0, high=4.0, unit="s", basis="measured here"))
    False
    """
    return estimate.high > WIDE_INTERVAL * estimate.low


def format_spread(estimate: Estimate) -> str:
    """The ratio or distance of the ends of an interval.

    >>> format_spread(Estimate(value=60.0, low=4.0, high=1272.0, unit="s", basis="calibrated"))
    '1 : 318'
    >>> format_spread(Estimate(value=3.0, low=0.0, high=10.0, unit="s", basis="calibrated"))
    '0 to 10.0 s'
    """
    return f"1 : {estimate.high / estimate.low:,.3g}" if estimate.low > 0 else format_interval(estimate)


def format_flops(per_second: float) -> str:
    """A rate of arithmetic.

    >>> [format_flops(rate) for rate in (4.3e11, 9.9e14, 2.5e6)]
    ['430 GFLOP/s', '990 TFLOP/s', '2.5 MFLOP/s']
    """
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= 0.9995 * size:
            return f"{per_second / size:.3g} {unit}FLOP/s"
    return f"{per_second:.3g} FLOP/s"


def format_gain(gain: Estimate) -> str:
    """The saving of a change, an estimate of a fraction.

    >>> format_gain(Estimate(value=0.23, low=0.1, high=0.3, unit="of the training time", basis="roofline"))
    'Saves about 23 % of the training time (10 to 30 %, roofline).'
    """
    interval = f"{100 * gain.low:.0f} to {100 * gain.high:.0f} %, {gain.basis}"
    return f"Saves about {100 * gain.value:.0f} % {gain.unit} ({interval})."


def format_samples(samples: float) -> str:
    """A number of samples in full: `187,392`."""
    return f"{samples:,.0f}"


def plan_differences(plan: Plan, other: Plan) -> tuple[tuple[str, str, str], ...]:
    """The settings in which two plans differ: (setting, value in `plan`, value in `other`)."""
    names = [field.name for field in dataclasses.fields(Plan)]
    pairs = [(name, str(getattr(plan, name)), str(getattr(other, name))) for name in names]
    return tuple((name.replace("_", " "), mine, theirs) for name, mine, theirs in pairs if mine != theirs)


def plan_in_difference(plan: Plan, chosen: Plan) -> str:
    """A plan by what it settles differently from the chosen one: `fp32, compiled, micro-batch 64`."""
    differences = [(name, mine) for name, mine, _ in plan_differences(plan, chosen)]
    speaking = {
        "device": "on {}",
        "loader": "{} loader",
        "memory format": "{}",
        "micro batch": "micro-batch {}",
        "num workers": "{} workers",
        "optimizer implementation": "{} optimiser",
        "precision": "{}",
        "checkpointed blocks": "{} blocks checkpointed",
        "malloc": "{} memory",
        "threads": "{} threads",
    }
    yes_or_no = {"compile": ("compiled", "not compiled"), "captured": ("captured", "not captured")}
    if plan.threads == 1:
        speaking["threads"] = "{} thread"
    parts = [
        yes_or_no[name][mine == "False"]
        if name in yes_or_no
        else speaking.get(name, f"{name} {{}}").format(mine.replace("_", "-"))
        for name, mine in differences
    ]
    return ", ".join(parts) or "the same settings"


def short(text: object, most: int = 160) -> str:
    """Text of a record, printable and of at most `most` characters: it may hold anything."""
    shown = printable(str(text)[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
