"""The sections of a run's report that are no figures: what templates of the page are given, and their HTML.

The report and the page of `stoker ui` show the same sections from the same templates.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from stoker.records import NOT_COMPARED, Achieved, Bottleneck, Candidate, Coupling, Estimate, Event, KernelTable, Report
from stoker.records.codec import JSON
from stoker.records.run import DATA_GUARANTEES, Example, ExampleSet
from stoker.reporting import history, pages, rank_section, summary, wording
from stoker.reporting.colours import BOUND_COLOURS, PHASE_COLOURS
from stoker.reporting.event_text import HOW_TO_OPEN, advice
from stoker.reporting.launch_text import launch_words
from stoker.reporting.pages import BarSegment
from stoker.reporting.plan_strip import WIDTH, plan_strip
from stoker.units import format_bytes, format_seconds

Values = Mapping[str, object]
"""The values of a template, by name."""


def run_sections(report: Report, examples: Sequence[ExampleSet] = (), *, profile_folder: str | None) -> Values:
    """Values of the template `run_sections`: samples, bottleneck, ranks, forecast, plan, contract, timeline, machine.

    `profile_folder` is where the files of `--profile` are for links; None for none.
    """
    return {
        "report": report,
        "phases": [
            BarSegment(s.label, PHASE_COLOURS.get(s.phase, "grey"), s.seconds, s.fraction)
            for s in summary.time_split(report)
        ],
        "settings": json.dumps(report.spec.settings, indent=2, ensure_ascii=False),
        "by_class": _by_class(report, examples),
        **_samples(examples),
        **_bottleneck(report),
        "profile_folder": profile_folder,
        **_ranks(report),
        **_forecast(report),
        **_plans(report),
        **_contract(report),
        **_timeline(report),
        "surroundings": _surroundings(report),
    }


def render_sections(report: Report, examples: Sequence[ExampleSet] = ()) -> str:
    """The sections as HTML without a page around them; links to files are left out."""
    return pages.render("run_sections", **run_sections(report, examples, profile_folder=None))


def _by_class(report: Report, sets: Sequence[ExampleSet]) -> list[tuple[str, str, list[tuple[str, str, float]]]]:
    """The last values of each metric that has one per class: title, text, and (class, value, length) of bars.

    Classes go by their names where each has its own, else by their numbers.
    """
    evaluations = history.of_kind(history.live_history(report.events), "evaluated")
    values: dict[str, dict[str, float]] = {}
    for name, value in history.evaluation_metrics(evaluations[-1]).items() if evaluations else ():
        if wording.is_of_class(name) and math.isfinite(value):
            base, _, of_class = name.partition("[")
            values.setdefault(base, {})[of_class.rstrip("]")] = value
    classes = next((split_set.classes for split_set in sets if split_set.classes), ())
    tables = []
    for base, numbered in values.items():
        is_named = len(set(classes)) == len(numbered) and set(numbered) == set(map(str, range(len(numbered))))
        of = {classes[int(number)] if is_named else number: value for number, value in numbered.items()}
        lowest, longest = min(of, key=of.__getitem__), max(map(abs, of.values())) or 1.0
        whole = 1.0 if wording.are_fractions(base, of.values()) else longest
        split = history.text(evaluations[-1], "split", "valid")
        note = f"{split}, at the end; lowest {of[lowest]:.4g} for class {lowest}"
        bars = [(name, wording.format_metric(base, y), max(0.0, y / whole)) for name, y in of.items()]
        tables.append((f"{base.replace('_', ' ').capitalize()} by class", note, bars))
    return tables


def _samples(sets: Sequence[ExampleSet]) -> Values:
    """A row of samples with the largest losses of each split, and one of its first samples."""
    rows = []
    for examples in sets:
        of = f"of {examples.num_samples:,} in {examples.split}"
        rows += [(f"Largest losses, {of}", examples.worst), (f"The first ones, {of}", examples.first)]
    return {
        "sample_rows": [row for row in rows if row[1]],
        "scale": next((examples.scale for examples in sets if examples.scale is not None), None),
        "is_right": _is_right,
        "short_name": _short_name,
    }


def _is_right(example: Example) -> bool:
    """Whether the output is the target, with or without its probability."""
    return re.fullmatch(rf"{re.escape(example.target)}( \(\d+ %\))?", example.output) is not None


_LONGEST = 28
"""Characters of a name under a picture; the whole name is its description."""


def _short_name(example: Example) -> str:
    if len(example.name) > _LONGEST:
        return f"…{example.name[1 - _LONGEST :]}"
    return example.name or f"#{example.index}"


def _bottleneck(report: Report) -> Values:
    """The run's bottleneck, and the results of `--profile`."""
    return {
        "bounds": _bound_shares(report.bottleneck) if report.bottleneck else (),
        "achieved_words": _achieved_words,
        "advice": advice,
        "kernels": _kernel_rows(report.kernels) if report.kernels else (),
        "how_to_open": HOW_TO_OPEN,
    }


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


def _bound_shares(bottleneck: Bottleneck) -> list[BarSegment]:
    """The resources that the run waited for, as parts of a bar."""
    whole = sum(share.value for share in bottleneck.shares)
    return [
        BarSegment(
            _LABELS.get(share.what, share.what),
            BOUND_COLOURS.get(share.what, "grey"),
            share.value,
            share.value / whole if whole else 0.0,
        )
        for share in bottleneck.shares
    ]


def _achieved_words(achieved: Achieved) -> str:
    """The rate of training and that of the device: `250 GFLOP/s of 430 GFLOP/s measured, 58 %`."""
    value = _in_unit(achieved.value, achieved.unit)
    if achieved.fraction is None:
        return f"{value}; the ceiling was not measured"
    ceiling = _in_unit(achieved.ceiling or 0.0, achieved.unit)
    text = f"{value} of {ceiling} measured, {100 * achieved.fraction:.0f} %"
    return text + (": caches serve what memory could not" if achieved.fraction > 1 else "")


def _in_unit(value: float, unit: str) -> str:
    return wording.format_flops(value) if unit == "FLOP/s" else f"{format_bytes(value)}/s"


_MOST_KERNELS = 12


def _kernel_rows(table: KernelTable) -> list[tuple[str, ...]]:
    """The top of a profile's table: operation, line, part, calls, time, share of the time, rate of arithmetic."""
    return [
        (
            kernel.operation,
            kernel.where,
            kernel.phase,
            f"{kernel.calls:,}",
            format_seconds(table.seconds(kernel)),
            f"{100 * table.seconds(kernel) / table.total_s if table.total_s else 0.0:.1f} %",
            "" if kernel.flops_per_s is None else wording.format_flops(kernel.flops_per_s),
        )
        for kernel in table.kernels[:_MOST_KERNELS]
    ]


def _ranks(report: Report) -> Values:
    merged_ranks = rank_section.shown_stretch(report)
    if merged_ranks is None:
        return {"ranks": None}
    return {
        "ranks": merged_ranks,
        "efficiency": rank_section.efficiency(merged_ranks, report),
        "rank_parts": rank_section.mean_split(merged_ranks),
        "rank_pictures": rank_section.lane_pictures(merged_ranks),
        "rank_columns": rank_section.COLUMNS,
        "rank_rows": rank_section.shown_ranks(merged_ranks),
        "rank_notes": rank_section.rank_notes(merged_ranks, report),
        "lane_colours": rank_section.LANE_COLOURS,
    }


def _forecast(report: Report) -> Values:
    """Each forecast quantity, and how many of the measured values fell inside their intervals."""
    rows = summary.forecast_rows(report) if report.decision is None or report.decision.is_settled else ()
    known = [row for row in rows if row.is_inside is not None]
    inside = sum(row.is_inside is True for row in known)
    note = f"{inside} of {len(known)} measured values lie in their interval, made to hold 8 of 10" if known else ""
    if wide := [row for row in known if row.is_inside and wording.is_wide(row.forecast)]:
        spans = ", ".join(f"{row.quantity} {wording.format_spread(row.forecast)}" for row in wide)
        note += f"; {len(wide)} of these intervals {'are' if len(wide) > 1 else 'is'} too wide to say much ({spans})"
    note += "." if note else ""
    settled = history.settled_switch(report)
    if settled is not None:
        after = f"after {wording.format_samples(settled.samples)} samples"
        note += f" The forecast was made when a plan was settled, {after}; update and throughput are since then."
    if len([segment for segment in history.plans_in_force(report) if not segment.is_trial]) > 1:
        began = "that the run settled on" if settled is not None else "that the run began with"
        note += f" The forecast is of the plan {began}; it went on under another."
    return {"forecasts": rows, "forecast_note": note, "is_wide": wording.is_wide, "strip_positions": strip_positions}


_STRIP_WIDTH, _STRIP_MARGIN = 150, 8


def strip_positions(forecast: Estimate, measured: float | None) -> tuple[float, float, float, float | None]:
    """Where the interval's ends, its value and what was measured are in a strip that spans them all [pixels]."""
    ends = [forecast.low, forecast.high, *([] if measured is None else [measured])]
    low, high = min(ends), max(ends)
    pad = (high - low) * 0.12 or max(abs(high), 1e-12)
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        return _STRIP_MARGIN + (value - low) / (high - low) * (_STRIP_WIDTH - 2 * _STRIP_MARGIN)

    return x(forecast.low), x(forecast.high), x(forecast.value), None if measured is None else x(measured)


def _plans(report: Report) -> Values:
    """The plans in force, those that also fit, and those that were rejected."""
    decision = report.decision
    if decision is None:
        return {}
    chosen, stretches, strip = decision.chosen, history.plans_in_force(report), plan_strip(report)
    ran = {row.in_full for row in strip.rows} if strip is not None else set()
    planned = f"{format_seconds(decision.took_s)} on {decision.device}"
    began_at_once = not decision.is_settled or history.settled_switch(report) is not None
    note = f"Began after {planned}, and tried plans on its own updates." if began_at_once else f"Planned in {planned}."
    return {
        "plan_strip": strip,
        "strip_width": WIDTH,
        "planned_note": note,
        "mostly": max(stretches, key=lambda stretch: stretch.share).plan,
        "others": [_candidate_row(candidate, chosen) for candidate in decision.candidates[1:]],
        "rejected": [
            (wording.plan_in_difference(rejection.plan, chosen.plan), rejection.reason)
            for rejection in decision.rejected
            if rejection.plan.in_words() not in ran
        ],
    }


def _candidate_row(candidate: Candidate, chosen: Candidate) -> tuple[str, ...]:
    forecast, whole = candidate.forecast, chosen.forecast.seconds_per_sample
    slower = forecast.seconds_per_sample / whole if whole else 1.0
    return (
        wording.plan_in_difference(candidate.plan, chosen.plan),
        format_seconds(forecast.total_s.value),
        format_bytes(forecast.peak_bytes.value),
        f"{slower:.2f}× the time",
    )


def _contract(report: Report) -> Values:
    """The exactness level the run held, and the facts it rests on."""
    spec, decision = report.spec, report.decision
    started = history.of_kind(report.events, "started")
    error = decision.chosen.forecast.gradient_error if decision else None
    return {
        "level": history.text(started[-1], "level") if started else "",
        "level_meaning": wording.level_meaning,
        "contract": [
            ("data", f"{spec.data_class}: {DATA_GUARANTEES[spec.data_class]}"),
            ("samples coupled", _coupling_words(report.coupling)),
            ("optimiser batch", _setting(spec.settings.get("batch"), "samples")),
            ("seed", _setting(spec.settings.get("seed"))),
            ("gradient error", f"{100 * error:.2g} % against fp32, on real batches" if error is not None else ""),
        ],
    }


def _coupling_words(coupling: Coupling | None) -> str:
    if coupling is None:
        return ""
    if coupling.evidence == NOT_COMPARED:
        return f"not compared: each update took its {coupling.group} samples at once, which is legal in any case"
    group = f" in groups of {coupling.group} samples" if coupling.group else ""
    causes = f" ({'; '.join(coupling.causes)})" if coupling.causes else ""
    return f"{coupling.kind.replace('_', ' ')}{group}{causes}; {coupling.evidence}"


_NOT_IN_TIMELINE = frozenset({"progress", "checkpointed", "logged"})
_MOST_LINES = 60


def _timeline(report: Report) -> Values:
    """Events by the clock; checkpoints and progress are in the figures."""
    superseded = len(report.events) - len(history.live_history(report.events))
    notable = [event for event in report.events if event.kind not in _NOT_IN_TIMELINE]
    shown = notable if len(notable) <= _MOST_LINES else [*notable[:20], *notable[20 - _MOST_LINES :]]
    checkpoints = history.of_kind(report.events, "checkpointed")
    notes = [f"{len(checkpoints)} checkpoints were written."] if checkpoints else []
    if superseded:
        notes.append(f"{superseded} events before a resume were superseded and are left out of the figures.")
    if len(shown) < len(notable):
        notes.append(f"{len(notable) - len(shown)} lines in the middle are left out.")
    return {
        "timeline": [(event, *_moment(event, report.events[0].at)) for event in shown],
        "timeline_note": " ".join(notes),
    }


def _moment(event: Event, began_at: float) -> tuple[str, str]:
    """The time of an event since the beginning as +h:mm:ss, and its date."""
    minutes, seconds = divmod(max(0, round(event.at - began_at)), 60)
    date = datetime.fromtimestamp(event.at, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"+{minutes // 60}:{minutes % 60:02}:{seconds:02}", date


def _surroundings(report: Report) -> list[tuple[str, str]]:
    """The job's settings and digests, and the machine it ran on."""
    spec, device, environment = report.spec, report.device, report.environment
    rows: list[tuple[str, str]] = [("job", f"{spec.name}{f' from {spec.entry}' if spec.entry else ''}")]
    rows += [("parameters", ", ".join(f"{name} = {_setting(value)}" for name, value in spec.parameters.items()))]
    if report.launch is not None:
        rows.append(("executed at", launch_words(report.launch, report.events, summary.settled_forecast(report))))
    if device is not None:
        memory = f"{device.cores} cores, {format_bytes(device.memory_bytes)}, fast in {', '.join(device.fast_dtypes)}"
        rows.append(("device", f"{device.model} ({memory})"))
    if environment is not None:
        versions = {"torch": environment.torch_version, "python": environment.python_version, **environment.libraries}
        rows.append(("software", ", ".join(f"{name} {version}" for name, version in versions.items())))
        threads = f"{environment.threads} thread{'s' if environment.threads > 1 else ''}"
        rows.append(("platform", f"{environment.platform}, {threads}"))
        rows.append(("flags", ", ".join(f"{name} = {value}" for name, value in environment.flags.items())))
        rows.append(("determinism class", environment.digest()))
    digests = [
        ("job digest", report.run.spec_digest),
        ("data", spec.data_fingerprint),
        ("weights", spec.weights_digest),
    ]
    rows += [(name, value[:16]) for name, value in digests]
    return [(name, value) for name, value in rows if value]


def _setting(value: JSON, unit: str = "") -> str:
    """A setting as text; quantities with their unit."""
    if isinstance(value, dict) and {"value", "unit"} <= set(value):
        return f"{value['value']:,g} {value['unit']}" if isinstance(value["value"], int | float) else str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,} {unit}".rstrip()
    return "" if value is None else str(value)
