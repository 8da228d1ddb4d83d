"""What `--profile` saw: the operations that took the most time, what held memory at its peak, and the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from stoker.records import Kernel, KernelTable, Report
from stoker.reporting.markup import Markup, element, escaped, joined, section, table
from stoker.reporting.wording import format_flops
from stoker.units import format_bytes, format_seconds

PROFILE_FOLDER = "profile"
"""Where the files lie, from the report."""
_MOST_ROWS, _MOST_SHARES = 12, 6
HOW_TO_OPEN = {
    "trace": "at ui.perfetto.dev, or `tensorboard --logdir` of its folder with torch-tb-profiler",
    "kernels": "in a spreadsheet: every operation by line",
    "memory": "in a spreadsheet: every allocation and free, with the total after it",
    "memory snapshot": "at pytorch.org/memory_viz",
}
"""How each file is opened."""


def profiled(report: Report) -> Markup:
    """The section; nothing for a run that was not profiled."""
    found = report.kernels
    if found is None:
        return Markup("")
    rows = [_cells(found, kernel) for kernel in found.kernels[:_MOST_ROWS]]
    where = "GPU" if found.is_on_gpu else "CPU"
    head = ("operation", "line and module", "part", "calls", f"{where} time", "share", "reached")
    last = found.first_update + found.updates
    note = (
        f"Updates {found.first_update + 1} to {last} under PyTorch's profiler, which slows them down: shares count. "
        "A line is where the function begins; an operation of the backward pass has the line of its forward operation."
    )
    return section(
        "What updates are made of",
        table(head, rows, css="kernels"),
        element("p", escaped(note), css="note"),
        _peak(found),
        _files(found),
    )


def file_lines(files: Mapping[str, str], folder: str) -> list[str]:
    """For the terminal: each file, by what it is, and how to open it."""
    return [f"{what}: {folder}/{name} (open {HOW_TO_OPEN.get(what, 'it')})" for what, name in files.items()]


def _cells(found: KernelTable, kernel: Kernel) -> Sequence[Markup]:
    seconds = found.seconds(kernel)
    share = seconds / found.total_s if found.total_s else 0.0
    return (
        escaped(kernel.operation),
        escaped(kernel.where),
        escaped(kernel.phase),
        escaped(f"{kernel.calls:,}"),
        escaped(format_seconds(seconds)),
        escaped(f"{100 * share:.1f} %"),
        escaped("" if kernel.flops_per_s is None else format_flops(kernel.flops_per_s)),
    )


def _peak(found: KernelTable) -> Markup:
    """What held memory at its peak."""
    if not found.peak_shares:
        return Markup("")
    shown = found.peak_shares[:_MOST_SHARES]
    parts = [f"{format_bytes(one.value)} {one.what}{f' ({one.where})' if one.where else ''}" for one in shown]
    words = f"At its peak, {format_bytes(found.peak_bytes)} above where the profile began: {'; '.join(parts)}"
    more = "; and smaller ones." if len(found.peak_shares) > len(shown) else "."
    return element("p", escaped(words + more), css="note")


def _files(found: KernelTable) -> Markup:
    """Links, which lead to files beside the report."""
    items = []
    for what, name in found.files.items():
        link = element("a", escaped(name), href=f"{PROFILE_FOLDER}/{quote(name)}")
        items.append(element("li", link, escaped(f": {what}; open {HOW_TO_OPEN.get(what, 'it')}")))
    return element("ul", joined(items), css="why")
