"""A run's report as one HTML file that needs nothing else: no network, no other file.

A content security policy in the page forbids it to load anything, and lets run only the scripts whose SHA-256 it names:
plotly.js (MIT licence), which is inside once, and what draws the figures with it. Source: W3C, Content Security Policy
Level 3, section 6.7.3, "Does element match source list for type and source?".

`render_side_by_side` compares runs on one page: the curves of each measure, over samples and over training time.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from plotly.offline import get_plotlyjs

from stoker.records import Candidate, Report, dumps
from stoker.records.codec import JSON
from stoker.records.run import Example, ExampleSet
from stoker.reporting.bottlenecks import bottleneck_section, profiled
from stoker.reporting.event_text import describe_event
from stoker.reporting.figures import (
    COLOURS,
    Chart,
    as_chart,
    blank_figure,
    charts,
    confusion_chart,
    evaluated,
    habit_charts,
    line_trace,
    series,
    thinned,
)
from stoker.reporting.history import (
    finite,
    live_history,
    number,
    of_kind,
    plans_in_force,
    samples_done,
    text,
    updates_done,
)
from stoker.reporting.markup import (
    PHASE_COLOURS,
    BarSegment,
    Markup,
    document,
    element,
    escaped,
    facts,
    header,
    interval_strip,
    joined,
    repainting,
    resource,
    script_json,
    section,
    stacked_bar,
    table,
)
from stoker.reporting.rank_section import ranks_together
from stoker.reporting.summary import ForecastRow, best_words, forecast_rows, time_split, wall_seconds
from stoker.reporting.wording import (
    DATA_GUARANTEES,
    are_fractions,
    format_interval,
    format_metric,
    format_metrics,
    format_quantity,
    format_samples,
    format_spread,
    headline_metric,
    is_wide,
    level_meaning,
    plan_in_difference,
)
from stoker.units import format_bytes, format_rate, format_seconds

_POLICY = "default-src 'none'; script-src {}; style-src 'unsafe-inline'; img-src data: blob:"


def render_html(report: Report, examples: Sequence[ExampleSet] = ()) -> str:
    """The report as a page of about 5 MB, nearly all of it plotly.js; a run without any chart needs no plotly.js.

    `examples` are samples of held-out sets, and what the trained weights made of them.
    """
    confused = [chart for one in examples if (chart := confusion_chart(one)) is not None]
    drawn = (
        *charts(report),
        *habit_charts(report, next((one.classes for one in examples if one.classes), ())),
        *confused,
    )
    body = joined(
        [
            headline(report),
            failure(report),
            figure_grid("Learning", [chart for chart in drawn if _is_learning(chart)]),
            figure_grid("Running", [chart for chart in drawn if not _is_learning(chart) and chart not in confused]),
            figure_grid("Confusion", confused),
            predictions(examples),
            bottleneck_section(report),
            ranks_together(report),
            profiled(report),
            time_spent(report),
            forecast_versus_measured(report),
            plan_and_why(report),
            contract(report),
            timeline(report),
            surroundings(report),
            element("footer", escaped(_FOOTER)),
        ]
    )
    return _document(report.run.name, element("main", body), _scripts(drawn))


def page(title: str, parts: Sequence[Markup], drawn: Sequence[Chart] = ()) -> str:
    """A page of its own, of parts that hold `drawn` as `figure_grid` lays them out."""
    return _document(title, element("main", *parts), _scripts(drawn))


def figure_grid(title: str, drawn: Sequence[Chart]) -> Markup:
    """A titled grid of figures, for `page`; nothing where there are none.

    Each figure has its words, for readers who do not see it, or print it before it is drawn.
    """
    if not drawn:
        return Markup("")
    figures = []
    for chart in drawn:
        caption = element("figcaption", element("b", escaped(chart.title)), element("span", escaped(chart.words)))
        label = f"{chart.title}: {chart.words}"
        plot = element("div", css="plot", id=chart.key, role="img", aria_label=label)
        figures.append(element("figure", caption, plot))
    return section(title, element("div", *figures, css=f"figures n{min(3, len(drawn))}"))


def _document(title: str, body: Markup, scripts: Markup) -> str:
    return document(title, joined([body, scripts]), policy=_policy())


def _is_learning(chart: Chart) -> bool:
    return chart.key == "loss" or chart.key.startswith(("metric-", "class-"))


def _scripts(drawn: Sequence[Chart]) -> Markup:
    if not drawn:
        return Markup("")
    figures = ",".join(f"{dumps(chart.key)}:{chart.figure}" for chart in drawn)
    data = f'{{"figures":{{{figures}}},"dark":{dumps(repainting(), indent=None)}}}'
    return joined(
        [
            element("script", script_json(data), type="application/json", id="report-data"),
            *(element("script", Markup(script)) for script in _programs()),
        ]
    )


@functools.cache
def _programs() -> tuple[str, ...]:
    """The scripts that run in a page; `report-data` is data, which does not run."""
    return str(get_plotlyjs()), resource("page.js")


@functools.cache
def _policy() -> str:
    """What a page may do: run these scripts and no other, draw with styles in it, show images in it."""
    digests = (hashlib.sha256(script.encode()).digest() for script in _programs())
    return _POLICY.format(" ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in digests))


_FOOTER = (
    "Counts are in samples. Forecast intervals are meant to hold 8 of 10 measured values. "
    "Made by Stoker; figures by plotly.js. This file loads nothing."
)
_STATUS_WORDS = {"finished": "finished", "failed": "failed", "unfinished": "not finished"}
_TIMELINE_KINDS = (
    "noted", "planned", "started", "resumed", "evaluated", "warned", "replanned", "recovered", "skipped", "stopped",
    "finished",
)  # fmt: skip
_MOST_LINES = 60


def headline(report: Report) -> Markup:
    """Name, status, the result in large, and what it took."""
    run = report.run
    return header(run.name, _STATUS_WORDS[run.status], run.status, _result(report), _effort(report))


def failure(report: Report) -> Markup:
    """What went wrong and what is left, for a run that failed or was cut off; else nothing."""
    run, events = report.run, live_history(report.events)
    if run.status == "finished":
        return Markup("")
    saved = of_kind(events, "checkpointed")
    stopped = of_kind(events, "stopped")
    position = format_samples(number(saved[-1], "samples") or 0) if saved else ""
    left = f"The last checkpoint holds {position} samples; the same command continues from there." if saved else ""
    if run.status == "failed":
        words = element("pre", escaped(run.failure or "no reason was recorded"))
        heading = f"Training failed at {format_samples(samples_done(report))} samples"
    else:
        words = element("p", escaped(describe_event(stopped[-1]))) if stopped else Markup("")
        heading = f"{format_samples(samples_done(report))} of {format_samples(run.total_samples)} samples are done"
    content = [element("h2", escaped(heading)), words, element("p", escaped(left)) if left else Markup("")]
    return element("aside", *content, css=f"notice {run.status}")


def time_spent(report: Report) -> Markup:
    """A stacked bar of where the time went, with its legend."""
    shares = time_split(report)
    if not shares:
        return Markup("")
    segments = [BarSegment(s.label, PHASE_COLOURS.get(s.phase, "grey"), s.seconds, s.fraction) for s in shares]
    return section("Where the time went", stacked_bar(segments))


def forecast_versus_measured(report: Report) -> Markup:
    """Each forecast quantity with its interval, what was measured, and whether it fell inside."""
    rows = forecast_rows(report)
    if not rows:
        return Markup("")
    cells = [_forecast_cells(row) for row in rows]
    known = [row for row in rows if row.is_inside is not None]
    inside = sum(row.is_inside is True for row in known)
    note = f"{inside} of {len(known)} measured values lie in their interval, made to hold 8 of 10" if known else ""
    if wide := [row for row in known if row.is_inside and is_wide(row.forecast)]:
        spans = ", ".join(f"{row.quantity} {format_spread(row.forecast)}" for row in wide)
        note += f"; {len(wide)} of these intervals {'are' if len(wide) > 1 else 'is'} too wide to say much ({spans})"
    note += "." if note else ""
    if len(plans_in_force(report)) > 1:
        note += " The forecast is of the plan that the run began with; it went on under another."
    head = ("quantity", "forecast", "interval", "", "measured", "of forecast", "in interval")
    return section(
        "Forecast beside measured", table(head, cells, css="forecast"), element("p", escaped(note), css="note")
    )


def plan_and_why(report: Report) -> Markup:
    """The chosen plan, the explanation, the plans that also fit, and those that were rejected."""
    decision = report.decision
    if decision is None:
        return Markup("")
    chosen = decision.chosen.plan
    stretches = plans_in_force(report)
    mostly = max(stretches, key=lambda stretch: stretch.share).plan
    choices = element("p", *(element("span", escaped(word)) for word in mostly.in_words().split(" · ")), css="choices")
    why = element("ol", *(element("li", escaped(line)) for line in decision.explanation), css="why")
    content = [choices, why]
    if len(stretches) > 1:
        lines = [
            f"From {format_samples(stretch.start)} samples on: {stretch.plan.in_words()}."
            f" {100 * stretch.share:.1f} % of the samples."
            for stretch in stretches
        ]
        content[1:1] = [element("p", escaped(line), css="note") for line in lines]
    if others := decision.candidates[1:]:
        rows = [_candidate_cells(candidate, decision.chosen) for candidate in others]
        content.append(_folded(f"{len(others)} more plans fit", table(("plan", "to finish", "memory", "loses"), rows)))
    if decision.rejected:
        rejected = [(escaped(plan_in_difference(r.plan, chosen)), escaped(r.reason)) for r in decision.rejected]
        content.append(_folded(f"{len(decision.rejected)} plans were rejected", table(("plan", "lost by"), rejected)))
    note = f"Planned in {format_seconds(decision.took_s)} on {decision.device}."
    return section("The plan, and why", *content, element("p", escaped(note), css="note"))


def contract(report: Report) -> Markup:
    """The exactness level the run held, and the facts it rests on."""
    spec, coupling = report.spec, report.coupling
    started = of_kind(report.events, "started")
    level = text(started[-1], "level") if started else ""
    badge = element("p", element("strong", escaped(level)), escaped(f": {level_meaning(level)}"), css="level")
    coupled = ""
    if coupling is not None:
        group = f" in groups of {coupling.group} samples" if coupling.group else ""
        causes = f" ({'; '.join(coupling.causes)})" if coupling.causes else ""
        coupled = f"{coupling.kind.replace('_', ' ')}{group}{causes}; {coupling.evidence}"
    decision = report.decision
    error = decision.chosen.forecast.gradient_error if decision else None
    rows = [
        ("data", f"{spec.data_class}: {DATA_GUARANTEES[spec.data_class]}"),
        ("samples coupled", coupled),
        ("optimiser batch", _setting(spec.settings.get("batch"), "samples")),
        ("seed", _setting(spec.settings.get("seed"))),
        ("gradient error", f"{100 * error:.2g} % against fp32, on real batches" if error is not None else ""),
    ]
    listed = facts([(term, escaped(value)) for term, value in rows])
    return section("What holds", badge if level else Markup(""), listed)


def surroundings(report: Report) -> Markup:
    """The job's settings and digests, and the machine it ran on."""
    spec, device, environment = report.spec, report.device, report.environment
    rows: list[tuple[str, object]] = [("job", f"{spec.name}{f' from {spec.entry}' if spec.entry else ''}")]
    rows += [("parameters", ", ".join(f"{name} = {_setting(value)}" for name, value in spec.parameters.items()))]
    if device is not None:
        memory = f"{device.cores} cores, {format_bytes(device.memory_bytes)}, fast in {', '.join(device.fast_dtypes)}"
        rows.append(("device", f"{device.model} ({memory})"))
    if environment is not None:
        versions = {"torch": environment.torch_version, "python": environment.python_version, **environment.libraries}
        rows.append(("software", ", ".join(f"{name} {version}" for name, version in versions.items())))
        rows.append(("platform", f"{environment.platform}, {environment.threads} threads"))
        rows.append(("flags", ", ".join(f"{name} = {value}" for name, value in environment.flags.items())))
        rows.append(("determinism class", environment.digest()))
    digests = [
        ("job digest", report.run.spec_digest),
        ("data", spec.data_fingerprint),
        ("weights", spec.weights_digest),
    ]
    rows += [(name, value[:16]) for name, value in digests]
    settings = json.dumps(spec.settings, indent=2, ensure_ascii=False)
    folded = _folded("All settings of the job", element("pre", escaped(settings)))
    return section("The job and the machine", facts([(term, escaped(value)) for term, value in rows if value]), folded)


def timeline(report: Report) -> Markup:
    """What happened, by the clock; checkpoints and progress are in the figures."""
    superseded = len(report.events) - len(live_history(report.events))
    notable = [event for event in report.events if event.kind in _TIMELINE_KINDS]
    if not notable:
        return Markup("")
    shown = notable if len(notable) <= _MOST_LINES else [*notable[:20], *notable[20 - _MOST_LINES :]]
    lines = []
    for event in shown:  # the time since the beginning as h:mm:ss, and on hover the date
        clock = datetime.fromtimestamp(event.at, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        minutes, seconds = divmod(max(0, round(event.at - report.events[0].at)), 60)
        since = element("time", escaped(f"+{minutes // 60}:{minutes % 60:02}:{seconds:02}"), title=clock)
        lines.append(element("li", since, element("span", escaped(describe_event(event))), css=event.kind))
    checkpoints = of_kind(report.events, "checkpointed")
    notes = [f"{len(checkpoints)} checkpoints were written."] if checkpoints else []
    if superseded:
        notes.append(f"{superseded} events before a resume were superseded and are left out of the figures.")
    if len(shown) < len(notable):
        notes.append(f"{len(notable) - len(shown)} lines in the middle are left out.")
    note = element("p", escaped(" ".join(notes)), css="note")
    return section("What happened", element("ol", *lines, css="timeline"), note)


def _result(report: Report) -> list[tuple[str, str]]:
    """The one number a run is known by; for a run without metrics, how far it came."""
    named = headline_metric(report.run.metrics)
    best = best_words(live_history(report.events))
    if named is None:
        done = samples_done(report) / report.run.total_samples if report.run.total_samples else 0.0
        value, label = f"{100 * done:.{0 if done >= 0.1 else 1}f} %", "of the training is done"
    else:
        value, label = format_metric(*named), named[0].replace("/", " ")
    split = named[0].split("/")[0] if named else ""
    others = {n: v for n, v in report.run.metrics.items() if named and n != named[0] and n.startswith(f"{split}/")}
    early = f"Ended before its time: {report.run.ended_early}." if report.run.ended_early else ""
    notes = [note for note in (best or "", format_metrics(others), early) if note]
    return [(label, "label"), (value, "big"), *((note, "note") for note in notes)]


def _effort(report: Report) -> list[tuple[str, str, str]]:
    """(label, value, note) of the tiles next to the result."""
    samples, updates, wall = samples_done(report), updates_done(report), wall_seconds(report)
    rows = {row.quantity: row for row in forecast_rows(report)}
    expected = rows.get("total time")
    forecast = f"forecast {format_seconds(expected.forecast.value)}" if expected else ""
    tiles = [("time", format_seconds(wall), forecast)] if wall else []
    rate = rows["throughput"].measured if "throughput" in rows else None
    rate = rate or (samples / wall if wall else None)
    if rate:
        tiles.append(("throughput", format_rate(rate), "while training" if "throughput" in rows else "over all"))
    epochs = samples / report.spec.num_train if report.spec.num_train else 0.0
    tiles.append(("samples", format_samples(samples), f"{epochs:.3g} epochs, {updates:,} updates"))
    if report.device is not None:
        threads = f", {words}" if (words := _threads(report)) else ""
        size = report.decision.chosen.plan.layout.world_size if report.decision else 1
        processes = f"{size} processes, " if size > 1 else ""
        tiles.append(("device", report.device.model, f"{processes}{report.device.cores} cores{threads}"))
    return tiles


def _threads(report: Report) -> str:
    """The threads that trained, with the share of the samples of each number if it changed."""
    shares: dict[int, float] = {}
    for stretch in plans_in_force(report):
        if stretch.plan.device == "cpu":
            shares[stretch.plan.threads] = shares.get(stretch.plan.threads, 0.0) + stretch.share
    if not shares and report.environment is not None:
        shares = {report.environment.threads: 1.0}
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    counts = [f"{threads} thread{'' if threads == 1 else 's'}" for threads, _ in ranked]
    if len(ranked) > 1:
        counts = [f"{count} for {100 * share:.1f} %" for count, (_, share) in zip(counts, ranked, strict=True)]
        counts[0] += " of the samples"
    return ", ".join(counts)


def _forecast_cells(row: ForecastRow) -> Sequence[Markup]:
    unit = row.forecast.unit
    verdict = {True: ("✓ yes", "good"), False: ("✗ no", "bad"), None: ("", "")}[row.is_inside]
    if row.is_inside and is_wide(row.forecast):
        verdict = (f"yes, of {format_spread(row.forecast)}", "note")
    return (
        escaped(row.quantity),
        escaped(format_quantity(row.forecast.value, unit)),
        element("span", escaped(format_interval(row.forecast)), title=f"basis: {row.forecast.basis}"),
        interval_strip(row.forecast, row.measured),
        escaped(format_quantity(row.measured, unit) if row.measured is not None else "not measured"),
        escaped(f"{row.ratio:.2f}×" if row.ratio is not None else ""),
        element("span", escaped(verdict[0]), css=verdict[1]),
    )


def _candidate_cells(candidate: Candidate, chosen: Candidate) -> Sequence[Markup]:
    forecast = candidate.forecast
    whole = chosen.forecast.seconds_per_sample
    slower = forecast.seconds_per_sample / whole if whole else 1.0
    return (
        escaped(plan_in_difference(candidate.plan, chosen.plan)),
        escaped(format_seconds(forecast.total_s.value)),
        escaped(format_bytes(forecast.peak_bytes.value)),
        escaped(f"{slower:.2f}× the time"),
    )


def _folded(title: str, content: Markup) -> Markup:
    return element("details", element("summary", escaped(title)), content)


def _setting(value: JSON, unit: str = "") -> str:
    """A setting as text; quantities with their unit."""
    if isinstance(value, dict) and {"value", "unit"} <= set(value):
        return f"{value['value']:,g} {value['unit']}" if isinstance(value["value"], int | float) else str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,} {unit}".rstrip()
    return "" if value is None else str(value)


_LONGEST = 28
"""Characters of a name under a picture; the whole name is its description."""


def predictions(sets: Sequence[ExampleSet]) -> Markup:
    """A row of samples with the largest losses of each split, and one of its first samples; else nothing."""
    rows = []
    for examples in sets:
        of = f"of {examples.num_samples:,} in {examples.split}"
        for title, shown in ((f"Largest losses, {of}", examples.worst), (f"The first ones, {of}", examples.first)):
            if shown:
                cards = element("div", *map(_card, shown), css="samples")
                rows.append(joined([element("h3", escaped(title)), cards]))
    scale = next((examples.scale for examples in sets if examples.scale is not None), None)
    if scale is not None:
        note = f"In all pictures black is {scale[0]:.4g} and white {scale[1]:.4g}."
        rows.append(element("p", escaped(note), css="note"))
    return section("Samples", *rows) if rows else Markup("")


def _card(example: Example) -> Markup:
    """A sample: its picture or numbers, the output, the target."""
    is_right = re.fullmatch(rf"{re.escape(example.target)}( \(\d+ %\))?", example.output) is not None
    label = example.name or f"sample {example.index}"
    pictures = {"": example.picture, "output": example.output_picture, "target": example.target_picture}
    picture = joined(_picture(png, label, of) for of, png in pictures.items() if png is not None)
    if not picture and example.values:
        picture = element("code", escaped(", ".join(f"{value:.3g}" for value in example.values)))
    loss = "" if example.loss is None else f"loss {example.loss:.3g}"
    name = example.name or f"#{example.index}"
    if len(example.name) > _LONGEST:
        name = f"…{example.name[1 - _LONGEST :]}"
    lines = [
        element("b", escaped(example.output), css="good" if is_right else "bad"),
        element("span", escaped(f"wanted {example.target}" if example.target else "")),
        element("span", escaped(" · ".join(part for part in (name, loss) if part))),
    ]
    return element("figure", picture, *lines, css="sample")


def _picture(png: str, label: str, of: str) -> Markup:
    """A picture; one that is not the sample itself has a word of what it is."""
    description = f"{label}, {of}" if of else label
    image = Markup(f'<img src="data:image/png;base64,{escaped(png)}" alt="{escaped(description)}">')
    return joined([element("span", escaped(of)), image]) if of else image


Point = tuple[float, float]


def render_side_by_side(reports: Sequence[Report]) -> str:
    """An HTML page of about 5 MB, nearly all of it plotly.js, that needs nothing else."""
    names = [one.run.name for one in reports]
    curves = []
    for report in reports:
        events = live_history(report.events)
        measured = {"train loss": series(of_kind(events, "progress"), "loss"), **evaluated(events)}
        curves.append({name: points for name, points in measured.items() if points})
    # What was measured once, such as the test at the end, is in the table above.
    measures = list(dict.fromkeys(name for one in curves for name, points in one.items() if len(points) > 1))
    by_samples = [_chart(measure, names, curves, None) for measure in measures]
    clocks = [_clock(one) for one in reports]
    by_time = [_chart(measure, names, curves, clocks) for measure in measures]
    parts = [
        element("header", element("h1", escaped(" · ".join(names)))),
        _outcomes(reports),
        figure_grid("Over samples", by_samples),
        figure_grid("Over training time", by_time),
        element("footer", escaped("Made by Stoker; figures by plotly.js. This file loads nothing.")),
    ]
    return page("Runs side by side", parts, (*by_samples, *by_time))


def _outcomes(reports: Sequence[Report]) -> Markup:
    rows = [
        [escaped(word) for word in (one.run.name, one.run.status, format_samples(samples_done(one)),
                                    format_seconds(one.run.wall_s), format_metrics(one.run.metrics))]
        for one in reports
    ]  # fmt: skip
    return section("What came of them", table(("run", "status", "samples", "time", "metrics"), rows))


def _clock(report: Report) -> tuple[list[float], list[float]]:
    """Samples, and the seconds trained until then; rising."""
    points = sorted(
        (samples, seconds)
        for event in of_kind(live_history(report.events), "progress")
        if (samples := finite(event, "samples")) is not None and (seconds := finite(event, "wall_s")) is not None
    )
    return [samples for samples, _ in points], [seconds for _, seconds in points]


def _chart(
    measure: str,
    names: Sequence[str],
    curves: Sequence[dict[str, list[Point]]],
    clocks: Sequence[tuple[list[float], list[float]]] | None,
) -> Chart:
    """One measure of all runs that have it; with `clocks`, over seconds, interpolated between progress events."""
    values = (y for of in curves for _, y in of.get(measure, ()))
    figure = blank_figure("samples" if clocks is None else "training time [s]",
                          y_format=".0%" if are_fractions(measure.rsplit(maxsplit=1)[-1], values) else "")  # fmt: skip
    lasts = []
    for index, (name, of) in enumerate(zip(names, curves, strict=True)):
        points = of.get(measure, [])
        if clocks is not None:  # a run without times has no place over time
            points = [(float(np.interp(x, *clocks[index])), y) for x, y in points if clocks[index][0]]
        if points:
            colour = COLOURS[index % len(COLOURS)]
            figure.add_trace(line_trace(thinned(points), name, colour, markers=measure != "train loss"))
            lasts.append(f"{name} {points[-1][1]:.4g}")
    key = f"{measure.replace(' ', '-')}-{'samples' if clocks is None else 'time'}"
    return as_chart(key, measure.capitalize(), f"last: {', '.join(lasts)}", figure)
