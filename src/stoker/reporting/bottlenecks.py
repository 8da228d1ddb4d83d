"""What holds a run back, and what `--profile` saw: the verdict, rates against ceilings, operations, memory, files."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from stoker.records import Achieved, Bottleneck, Event, KernelTable, Report, from_json
from stoker.reporting.markup import (
    BOUND_COLOURS,
    BarSegment,
    Markup,
    element,
    escaped,
    section,
    stacked_bar,
    table,
)
from stoker.reporting.wording import format_flops, format_gain
from stoker.units import format_bytes, format_seconds

_LABELS = {
    "arithmetic": "arithmetic: products and convolutions",
    "memory bandwidth": "memory bandwidth",
    "host launch": "the host: Python, autograd, starting operations",
    "copies": "batches on their way to the device",
    "data": "waiting for data",
    "checkpoints": "checkpoints",
    "evaluation": "evaluation",
    "unknown": "updates, inside unknown",
}
_WIDTH, _HEIGHT = 180, 12


def bottleneck_section(report: Report) -> Markup:
    """The section; nothing for a run without a verdict."""
    found = report.bottleneck
    if found is None:
        return Markup("")
    is_known = found.bound_by != "unknown"
    whole = sum(share.value for share in found.shares)
    segments = [
        BarSegment(
            _LABELS.get(share.what, share.what), BOUND_COLOURS.get(share.what, "grey"), share.value,
            share.value / whole if whole else 0.0,
        )
        for share in found.shares
    ]  # fmt: skip
    sentence = element("strong", escaped(found.sentence)) if is_known else escaped(found.sentence)
    content = [element("p", sentence, css="level" if is_known else "note"), stacked_bar(segments)]
    if found.achieved:  # what training reached of what the device reaches, with the utilisation first
        rows = [_achieved_row(achieved) for achieved in found.achieved]
        if found.mfu is not None:
            used = f"{100 * found.mfu:.0f} % of the time would do at the measured ceilings"
            rows.insert(0, _row("MFU", found.mfu, used))
        content.append(element("div", *rows, css="rates"))
    content += [element("p", escaped(problem), css="bad") for problem in found.problems]
    helps = escaped("What would help most: ")
    content.append(element("p", element("b", helps) if is_known else helps, escaped(advice(found)),
                           css="advice" if is_known else "note"))  # fmt: skip
    content.append(element("ul", *(element("li", escaped(line)) for line in found.evidence), css="why"))
    return section("What holds the run back", *content)


def advice(found: Bottleneck) -> str:
    """The change that would help most, and by how much: `Evaluate half as often: …; saves about 12 % …`."""
    return found.advice if found.gain is None else f"{found.advice} {format_gain(found.gain)}"


def verdict_lines(found: Bottleneck) -> list[str]:
    """The verdict for the terminal: the sentence with its utilisation, what would help, and what cannot be true."""
    used = f" MFU {100 * found.mfu:.0f} % of the measured ceiling." if found.mfu is not None else ""
    return [f"{found.sentence}{used}", advice(found), *found.problems]


def closing_lines(finished: Event) -> list[str]:
    """What a `finished` event says of the verdict and of a profile, for the terminal."""
    found, profile = finished.fields.get("bottleneck"), finished.fields.get("profile")
    lines = verdict_lines(from_json(found, Bottleneck)) if isinstance(found, Mapping) else []
    if isinstance(profile, Mapping) and isinstance(profile.get("files"), Mapping):
        lines += file_lines(profile["files"], str(profile.get("folder", "")))
    return lines


def _achieved_row(achieved: Achieved) -> Markup:
    value = _in_unit(achieved.value, achieved.unit)
    if achieved.fraction is None:
        return _row(achieved.what, None, f"{value}; the ceiling was not measured")
    ceiling = _in_unit(achieved.ceiling or 0.0, achieved.unit)
    text = f"{value} of {ceiling} measured, {100 * achieved.fraction:.0f} %"
    if achieved.fraction > 1:
        text += ": caches serve what memory could not"
    return _row(achieved.what, achieved.fraction, text)


def _row(label: str, fraction: float | None, words: str) -> Markup:
    """A label, a bar up to the ceiling, and the figures."""
    width = 0.0 if fraction is None else min(1.0, fraction) * _WIDTH
    gauge = Markup(
        f'<svg class="gauge" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" aria-hidden="true">'
        f'<rect class="room" width="{_WIDTH}" height="{_HEIGHT}" rx="4"/>'
        f'<rect class="used" width="{width:.1f}" height="{_HEIGHT}" rx="4"/></svg>'
    )
    return element("div", element("span", escaped(label)), gauge, element("span", escaped(words), css="note"))


def _in_unit(value: float, unit: str) -> str:
    return format_flops(value) if unit == "FLOP/s" else f"{format_bytes(value)}/s"


PROFILE_FOLDER = "profile"
"""Where the files are, from the report."""
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
    rows = []
    for kernel in found.kernels[:_MOST_ROWS]:
        seconds = found.seconds(kernel)
        share = seconds / found.total_s if found.total_s else 0.0
        rate = "" if kernel.flops_per_s is None else format_flops(kernel.flops_per_s)
        cells = (
            kernel.operation, kernel.where, kernel.phase, f"{kernel.calls:,}", format_seconds(seconds),
            f"{100 * share:.1f} %", rate,
        )  # fmt: skip
        rows.append([escaped(cell) for cell in cells])
    files = []  # links to files in the report's directory
    for what, name in found.files.items():
        link = element("a", escaped(name), href=f"{PROFILE_FOLDER}/{quote(name)}")
        files.append(element("li", link, escaped(f": {what}; open {HOW_TO_OPEN.get(what, 'it')}")))
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
        element("ul", *files, css="why"),
    )


def file_lines(files: Mapping[str, str], folder: str) -> list[str]:
    """For the terminal: each file, by what it is, and how to open it."""
    return [f"{what}: {folder}/{name} (open {HOW_TO_OPEN.get(what, 'it')})" for what, name in files.items()]


def _peak(found: KernelTable) -> Markup:
    """What held memory at its peak."""
    if not found.peak_shares:
        return Markup("")
    shown = found.peak_shares[:_MOST_SHARES]
    parts = [f"{format_bytes(one.value)} {one.what}{f' ({one.where})' if one.where else ''}" for one in shown]
    words = f"At its peak, {format_bytes(found.peak_bytes)} above where the profile began: {'; '.join(parts)}"
    more = "; and smaller ones." if len(found.peak_shares) > len(shown) else "."
    return element("p", escaped(words + more), css="note")
