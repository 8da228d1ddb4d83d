"""What a device's measured rates mean for a plan."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.devices import catalogue
from stoker.records import Ceilings

WORTHWHILE_RATIO = 1.2
"""How much faster than fp32 a dtype must multiply before a plan would gain from it."""


@dataclass(frozen=True)
class Reading:
    """One measured rate, with what it means for a plan.

    `share` is its fraction of the fastest of its kind [0 to 1], `of_datasheet` of the vendor's figure (None: unknown).
    """

    name: str
    rate: float
    unit: str
    share: float
    of_datasheet: float | None
    meaning: str


def interpret(ceilings: Ceilings) -> tuple[Reading, ...]:
    """Every measured rate with what it means for a plan."""
    entry = catalogue().describing(ceilings.device)
    peaks = entry.dense_flops if entry else {}
    fastest, fp32 = max(ceilings.gemm_flops.values()), ceilings.gemm_flops.get("fp32")
    products = []
    for dtype, rate in ceilings.gemm_flops.items():
        of_peak = rate / peaks[dtype] if dtype in peaks else None
        meaning = _meaning_of_product(dtype, rate, fp32)
        products.append(Reading(f"matrix product {dtype}", rate, "FLOP/s", rate / fastest, of_peak, meaning))
    copy, fresh = ceilings.copy_bytes_per_s, ceilings.fresh_copy_bytes_per_s
    of_peak = copy / entry.bandwidth_bytes_per_s if entry else None
    ridge = f"the limit under {(fp32 or fastest) / copy:.1f} FLOPs a byte"
    copies = [
        Reading("copy, memory in use", copy, "B/s", 1.0, of_peak, ridge),
        Reading("copy, fresh memory", fresh, "B/s", min(1.0, fresh / copy), None, _meaning_of_fresh(copy / fresh)),
    ]
    if (across := ceilings.host_to_device_bytes_per_s) is not None:
        meaning = "how fast a pinned batch crosses"
        copies.append(Reading("host to device", across, "B/s", min(1.0, across / copy), None, meaning))
    return (*products, *copies)


def _meaning_of_product(dtype: str, rate: float, fp32: float | None) -> str:
    """What the rate [FLOP/s] of a dtype's products means for a plan."""
    if dtype == "fp32" or not fp32:
        return "the base of comparison"
    ratio = rate / fp32
    if dtype == "fp16":
        return f"{ratio:.1f}x fp32: only if the job asks"
    if ratio >= WORTHWHILE_RATIO:
        return f"{ratio:.1f}x fp32: a plan may use it"
    slower = f"{1 / ratio:.1f}x slower than fp32" if ratio < 1 else f"only {ratio:.1f}x fp32"
    return f"{slower}: no gain for a plan"


def _meaning_of_fresh(times_slower: float) -> str:
    """What the rate into fresh memory means."""
    if times_slower < WORTHWHILE_RATIO:
        return "as fast as memory in use"
    return f"{times_slower:.1f}x slower: reuse saves time"


def format_si(rate: float, unit: str) -> str:
    """A rate in decimal units with three figures.

    >>> [format_si(4.309e11, "FLOP/s"), format_si(5.9e9, "B/s"), format_si(7.9e14, "FLOP/s")]
    ['431 GFLOP/s', '5.90 GB/s', '790 TFLOP/s']
    """
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= size:
            scaled = rate / size
            return f"{scaled:.{max(0, 2 - len(str(int(scaled))) + 1)}f} {prefix}{unit}"
    return f"{rate:.0f} {unit}"
