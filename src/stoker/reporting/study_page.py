"""A study as one HTML file that needs nothing else: the best settings, what was spent, figures, every trial."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from stoker.records import Estimate
from stoker.records.codec import JSON
from stoker.records.study import Parameter, StudyForecast, StudyResult, StudyTrial
from stoker.reporting.colours import light
from stoker.reporting.figures import Chart, as_chart, blank_figure, line_trace, render_with_figures
from stoker.reporting.folded_log import thinned
from stoker.reporting.wording import are_fractions, format_interval, format_metric, format_quantity, format_samples
from stoker.units import format_seconds

_MOST_ROWS = 500


def render_study(result: StudyResult) -> str:
    """The page, about 5 MB of it plotly.js."""
    settings, best = result.settings, result.best
    names, drawn = [parameter.name for parameter in settings.space], study_charts(result)
    lines = [("no trial is finished yet", "label")]
    if best is not None and best.value is not None:
        name = settings.objective
        chosen = ", ".join(f"{key}={format_setting(value)}" for key, value in best.parameters.items())
        lines = [(name, "label"), (format_metric(name, best.value), "big"), (f"trial {best.number}: {chosen}", "note")]
    return render_with_figures(
        "study",
        drawn,
        title=settings.name,
        is_done=best is not None and not any(one.state == "running" for one in result.trials),
        result=lines,
        tiles=_spent(result),
        search=drawn[:2],
        settings=drawn[2:],
        objective=settings.objective,
        names=names,
        # Of a population: what led to the best trial, whose settings no one run had all the way.
        lineage=[
            (
                one.number,
                one.member,
                one.interval,
                *_row(one, names, settings.objective)[1:-4],
                f"{one.curve[-1][0]:,}" if one.curve else "",
            )
            for one in (result.lineage(best.number) if settings.members and best is not None else ())
        ],
        trials=[_row(trial, names, settings.objective) for trial in result.ranked[:_MOST_ROWS]],
        num_trials=len(result.trials),
        forecast=result.forecast,
        expected=[] if result.forecast is None else _expected(result.forecast, result),
        about=_about(result),
    )


def _spent(result: StudyResult) -> list[tuple[str, str, str]]:
    states = ("finished", "handed on", "pruned", "failed")
    counts = {state: sum(trial.state == state for trial in result.trials) for state in states}
    whole = (result.settings.members or len(result.trials)) * result.settings.total_samples
    share = f"{result.samples / whole:.0%} of training every trial to its end" if whole else ""
    return [
        ("trials", str(len(result.trials)), ", ".join(f"{count} {state}" for state, count in counts.items() if count)),
        ("samples trained", format_samples(result.samples), share),
        ("training time", format_seconds(sum(trial.wall_s for trial in result.trials)), "of all trials together"),
    ]


def _row(trial: StudyTrial, names: Sequence[str], objective: str) -> tuple[object, ...]:
    value = "" if trial.value is None else format_metric(objective, trial.value)
    return (
        trial.number,
        value,
        *(format_setting(trial.parameters.get(name)) for name in names),
        format_samples(trial.samples),
        format_seconds(trial.wall_s) if trial.wall_s else "",
        trial.state,
        trial.reason,
    )


def format_setting(value: JSON) -> str:
    """A setting's value in a few figures."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _expected(forecast: StudyForecast, result: StudyResult) -> list[tuple[str, str]]:
    spent = format_seconds(sum(trial.wall_s for trial in result.trials))
    rows = [
        (name, f"{format_quantity(estimate.value, estimate.unit)} ({format_interval(estimate)})")
        for name, estimate in estimates_of(forecast)
        if estimate is not None
    ]
    return [*rows, ("training time of all trials so far, added up", spent)]


def estimates_of(forecast: StudyForecast) -> list[tuple[str, Estimate | None]]:
    """The forecast of a study, by name."""
    at_once = f", {forecast.parallel} at once" if forecast.parallel > 1 else ""
    return [
        (f"every trial to its end{at_once}", forecast.total_s),
        (f"with pruning{at_once}", forecast.pruned_s),
        ("energy, every trial to its end", forecast.energy_kwh),
        ("rent of such a device, every trial to its end", forecast.cost_usd),
    ]


def _about(result: StudyResult) -> list[tuple[str, object]]:
    settings = result.settings
    return [
        ("job", settings.job),
        ("begun", settings.made_at),
        ("sampler", settings.sampler),
        ("pruner", settings.pruner),
        ("seed", settings.seed),
        ("population", f"{settings.members} members, {settings.intervals} intervals" if settings.members else ""),
        ("set for all trials", ", ".join(f"{name}={value}" for name, value in settings.fixed.items())),
        ("samples of a whole trial", format_samples(settings.total_samples)),
        ("chosen by", f"{settings.objective}; the test data was not used"),
    ]


_MOST_CURVES = 200
_SHADES = ("ember", "amber", "teal", "blue", "grey")
"""Colours of fifths of the finished trials in parallel coordinates, the best first."""


def study_charts(result: StudyResult) -> tuple[Chart, ...]:
    """The figures that a study's trials allow."""
    drawn = [_best_so_far(result), _curves(result), _coordinates(result), _importance(result)]
    return tuple(chart for chart in drawn if chart is not None)


def best_so_far(result: StudyResult) -> list[tuple[float, float, float]]:
    """(samples, seconds, value): the best finished value after so many samples and seconds of all trials together.

    Trials count in the order in which they ended, each with all that was spent on it.
    """
    done = [trial for trial in result.trials if trial.ended_at is not None]
    points: list[tuple[float, float, float]] = []
    samples, seconds, best = 0, 0.0, None
    for trial in sorted(done, key=lambda one: (one.ended_at or 0.0, one.number)):
        samples, seconds = samples + trial.samples, seconds + trial.wall_s
        if trial.state == "finished" and trial.value is not None:
            better = max if result.settings.higher_is_better else min
            best = trial.value if best is None else better(best, trial.value)
        if best is not None:
            points.append((samples, seconds, best))
    return points


def _best_so_far(result: StudyResult) -> Chart | None:
    points = best_so_far(result)
    if not points:
        return None
    name = _bare(result)
    figure = _figure_of(result, "samples of all trials")
    trace = line_trace([(samples, value) for samples, _, value in points], "best", "ember", width=2.4)
    trace.line.shape = "hv"
    figure.add_trace(trace)
    samples, seconds, value = points[-1]
    caption = (
        f"{format_metric(name, value)} after {format_samples(samples)} samples, {format_seconds(seconds)} of training"
    )
    return as_chart("study-best", f"Best {name.replace('_', ' ')} so far", caption, figure)


def _curves(result: StudyResult) -> Chart | None:
    """Every trial's evaluations: the best thick, finished ones plain, pruned ones pale; of many trials the best ones.

    In a population a curve begins where its parent's ends, and the best is all that led to it.
    """
    with_curve = [trial for trial in result.ranked if trial.curve]
    shown = with_curve[:_MOST_CURVES]
    if not shown:
        return None
    figure, ends = (
        _figure_of(result, "samples of one trial"),
        {trial.number: trial.curve[-1:] for trial in result.trials},
    )
    best = set() if result.best is None else {trial.number for trial in result.lineage(result.best.number)}
    for trial in sorted(shown, key=lambda one: (one.number in best, one.state == "finished")):
        curve = (*(() if trial.parent is None else ends[trial.parent]), *trial.curve)
        points = [(float(samples), value) for samples, value in curve if math.isfinite(value)]
        if not points:
            continue
        is_best = trial.number in best
        colour = "ember" if is_best else "blue" if trial.state == "finished" else "grey"
        name = f"trial {trial.number}" + ("" if trial.state == "finished" else f", {trial.state}")
        trace = line_trace(thinned(points), name, colour, width=3.0 if is_best else 1.1)
        trace.opacity = 1.0 if is_best else 0.75 if trial.state in ("finished", "handed on") else 0.45
        figure.add_trace(trace)
    pruned = sum(trial.state == "pruned" for trial in shown)
    figure.update_layout(hovermode="closest")
    of = f" of {len(with_curve)}, the best" if len(shown) < len(with_curve) else ""
    caption = f"{len(shown)} trials{of}, {pruned} of them pruned"
    return as_chart("study-curves", "All trials", caption, figure, has_legend=False)


def _coordinates(result: StudyResult) -> Chart | None:
    """A line for each trial through the values of its settings, each on its own axis, to the objective at the right."""
    finished = [trial for trial in result.ranked if trial.state == "finished" and trial.value is not None]
    if len(finished) < 2:
        return None
    axes = list(result.settings.space)
    figure = blank_figure("")
    values = [trial.value or 0.0 for trial in finished]
    low, high = min(values), max(values)
    for rank, trial in reversed(list(enumerate(finished))):
        heights = [_height(axis, trial.parameters.get(axis.name)) for axis in axes]
        heights.append((trial.value or 0.0) - low if high == low else ((trial.value or 0.0) - low) / (high - low))
        shade = _SHADES[min(len(_SHADES) - 1, rank * len(_SHADES) // len(finished))]
        trace = line_trace([(float(i), height) for i, height in enumerate(heights)], _hover_text(trial, result), shade)
        trace.line.width, trace.opacity = (3.0, 1.0) if rank == 0 else (1.3, 0.7)
        trace.hoverinfo = "name"
        figure.add_trace(trace)
    _draw_axes(figure, axes, result, (low, high))
    caption = "the best fifth orange, the best thick"
    return as_chart("study-coordinates", "Settings of finished trials", caption, figure, has_legend=False)


def _draw_axes(figure: Any, axes: Sequence[Parameter], result: StudyResult, ends: tuple[float, float]) -> None:
    names = [axis.name for axis in axes] + [_bare(result)]
    marks = []
    for axis in axes:
        if axis.kind == "choice":
            marks.append([(_height(axis, value), str(value)) for value in axis.choices])
        else:
            marks.append([(0.0, f"{axis.low:g}"), (1.0, f"{axis.high:g}")])
    marks.append([(0.0, format_metric(_bare(result), ends[0])), (1.0, format_metric(_bare(result), ends[1]))])
    for place, ticks in enumerate(marks):
        figure.add_vline(x=place, line={"color": light("line"), "width": 1})
        for height, words in ticks:
            figure.add_annotation(
                x=place,
                y=height,
                text=html.escape(words),
                showarrow=False,
                xanchor="left",
                xshift=4,
                font={"size": 11, "color": light("muted")},
                bgcolor=light("surface"),
                opacity=0.85,
            )
    figure.update_layout(
        hovermode="closest",
        xaxis={
            "tickvals": list(range(len(names))),
            "ticktext": [html.escape(name) for name in names],
            "range": [-0.05, len(names) - 0.55],
            "showgrid": False,
            "rangemode": "normal",
        },
        yaxis={"visible": False, "range": [-0.08, 1.08]},
    )


def _height(axis: Parameter, value: JSON) -> float:
    """Where a value is on its axis, from 0 to 1."""
    if axis.kind == "choice":
        return axis.choices.index(value) / (len(axis.choices) - 1) if value in axis.choices else 0.0
    number = float(value)
    if axis.is_logarithmic:
        return math.log(number / axis.low) / math.log(axis.high / axis.low)
    return (number - axis.low) / (axis.high - axis.low)


def _importance(result: StudyResult) -> Chart | None:
    if not result.importance:
        return None
    ordered = sorted(result.importance.items(), key=lambda item: item[1])
    figure = blank_figure("share", from_zero=True)
    figure.add_trace(
        go.Bar(
            x=[share for _, share in ordered],
            y=[html.escape(name) for name, _ in ordered],
            orientation="h",
            marker={"color": light("teal")},
            hovertemplate="%{y}: %{x:.0%}<extra></extra>",
        )
    )
    figure.update_layout(
        hovermode="closest", xaxis={"tickformat": ".0%"}, yaxis={"showgrid": False, "tickmode": "linear"}
    )
    finished = sum(trial.state == "finished" for trial in result.trials)
    caption = f"of being among the best of {finished} finished trials (PED-ANOVA)"
    return as_chart("study-importance", "What mattered", caption, figure)


def _figure_of(result: StudyResult, x_title: str) -> Any:
    values = [y for trial in result.trials for _, y in trial.curve] + [trial.value or 0.0 for trial in result.trials]
    is_in_per_cent = are_fractions(_bare(result), filter(math.isfinite, values))
    return blank_figure(x_title, y_format=".1%" if is_in_per_cent else "")


def _hover_text(trial: StudyTrial, result: StudyResult) -> str:
    settings = ", ".join(f"{name} {format_setting(value)}" for name, value in trial.parameters.items())
    return f"trial {trial.number}: {format_metric(_bare(result), trial.value or 0.0)} ({settings})"


def _bare(result: StudyResult) -> str:
    return result.settings.objective.removeprefix("valid/")
