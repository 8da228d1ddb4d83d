"""A study as one HTML file that needs nothing else: the best settings, what was spent, figures, every trial."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.records import Estimate
from stoker.records.codec import JSON
from stoker.records.study import StudyForecast, StudyResult, StudyTrial
from stoker.reporting.html import figure_grid, page
from stoker.reporting.markup import Markup, element, escaped, facts, section, table
from stoker.reporting.study_figures import study_charts
from stoker.reporting.wording import format_interval, format_metric, format_quantity, format_samples
from stoker.units import format_seconds

_MOST_ROWS = 500


def render_study(result: StudyResult) -> str:
    """The page, about 5 MB of it plotly.js."""
    drawn = study_charts(result)
    parts = [
        _headline(result),
        figure_grid("Search", drawn[:2]),
        figure_grid("Settings", drawn[2:]),
        _lineage(result),
        _trials(result),
        _forecast(result),
        _about(result),
        element(
            "footer", escaped("Counts are in samples. Made by Stoker; figures by plotly.js. This file loads nothing.")
        ),
    ]
    return page(result.settings.name, parts, drawn)


def _headline(result: StudyResult) -> Markup:
    settings, best = result.settings, result.best
    running = sum(one.state == "running" for one in result.trials)
    words, css = ("going on", "unfinished") if running or best is None else ("done", "finished")
    title = element("div", element("h1", escaped(settings.name)), element("span", escaped(words), css=f"status {css}"),
                    css="title")  # fmt: skip
    tiles = element("div", *(_tile(*one) for one in _spent(result)), css="tiles")
    return element("header", title, element("div", _best(result), tiles, css="hero"))


def _best(result: StudyResult) -> Markup:
    """The best value in large, with its settings."""
    name, best = result.settings.objective, result.best
    if best is None or best.value is None:
        return element("div", element("p", escaped("no trial is finished yet"), css="label"), css="result")
    chosen = ", ".join(f"{key}={format_setting(value)}" for key, value in best.parameters.items())
    lines = ((name, "label"), (format_metric(name, best.value), "big"), (f"trial {best.number}: {chosen}", "note"))
    return element("div", *(element("p", escaped(line), css=css) for line, css in lines), css="result")


def _spent(result: StudyResult) -> list[tuple[str, str, str]]:
    states = ("finished", "handed on", "pruned", "failed")
    counts = {state: sum(one.state == state for one in result.trials) for state in states}
    whole = (result.settings.members or len(result.trials)) * result.settings.total_samples
    share = f"{result.samples / whole:.0%} of training every trial to its end" if whole else ""
    return [
        ("trials", str(len(result.trials)), ", ".join(f"{count} {state}" for state, count in counts.items() if count)),
        ("samples trained", format_samples(result.samples), share),
        ("training time", format_seconds(sum(one.wall_s for one in result.trials)), "of all trials together"),
    ]


def _tile(label: str, value: str, note: str) -> Markup:
    parts = [element("p", escaped(label), css="label"), element("p", escaped(value), css="value")]
    return element("div", *parts, element("p", escaped(note), css="note"), css="tile")


def _lineage(result: StudyResult) -> Markup:
    """Of a population: what led to the best trial, whose settings no one run had all the way."""
    if not result.settings.members or result.best is None:
        return Markup("")
    names = [parameter.name for parameter in result.settings.space]
    head = ("trial", "member", "interval", result.settings.objective, *names, "up to samples")
    rows = [
        [*map(escaped, (one.number, one.member, one.interval)), *_row(one, names, result.settings.objective)[1:-4],
         escaped(f"{one.curve[-1][0]:,}" if one.curve else "")]
        for one in result.lineage(result.best.number)
    ]  # fmt: skip
    return section("How the best came about", table(head, rows))


def _trials(result: StudyResult) -> Markup:
    """Every trial, best first."""
    names = [parameter.name for parameter in result.settings.space]
    head = ("trial", result.settings.objective, *names, "samples", "time", "state", "")
    rows = [_row(trial, names, result.settings.objective) for trial in result.ranked[:_MOST_ROWS]]
    of = f": {len(rows)} of {len(result.trials)}" if len(rows) < len(result.trials) else ""
    return section(f"Trials, best first{of}", table(head, rows)) if rows else Markup("")


def _row(trial: StudyTrial, names: Sequence[str], objective: str) -> Sequence[Markup]:
    value = "" if trial.value is None else format_metric(objective, trial.value)
    return (
        escaped(trial.number), escaped(value), *(escaped(format_setting(trial.parameters.get(name))) for name in names),
        escaped(format_samples(trial.samples)), escaped(format_seconds(trial.wall_s) if trial.wall_s else ""),
        escaped(trial.state), escaped(trial.reason),
    )  # fmt: skip


def format_setting(value: JSON) -> str:
    """A setting's value in a few figures."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _forecast(result: StudyResult) -> Markup:
    forecast = result.forecast
    if forecast is None:
        return Markup("")
    spent = sum(one.wall_s for one in result.trials)
    rows = [(name, escaped(_interval(one))) for name, one in estimates_of(forecast) if one is not None]
    measured = ("training time of all trials so far, added up", escaped(format_seconds(spent)))
    lines = element("ul", *(element("li", escaped(line)) for line in forecast.assumptions))
    return section("What was expected", facts([*rows, measured]), lines)


def estimates_of(forecast: StudyForecast) -> list[tuple[str, Estimate | None]]:
    """What a study was expected to take, by name."""
    at_once = f", {forecast.parallel} at once" if forecast.parallel > 1 else ""
    return [
        (f"every trial to its end{at_once}", forecast.total_s), (f"with pruning{at_once}", forecast.pruned_s),
        ("energy, every trial to its end", forecast.energy_kwh),
        ("rent of such a device, every trial to its end", forecast.cost_usd),
    ]  # fmt: skip


def _interval(estimate: Estimate) -> str:
    return f"{format_quantity(estimate.value, estimate.unit)} ({format_interval(estimate)})"


def _about(result: StudyResult) -> Markup:
    settings = result.settings
    fixed = ", ".join(f"{name}={value}" for name, value in settings.fixed.items())
    rows = [
        ("job", escaped(settings.job)), ("begun", escaped(settings.made_at)), ("sampler", escaped(settings.sampler)),
        ("pruner", escaped(settings.pruner)), ("seed", escaped(settings.seed)),
        ("population", escaped(f"{settings.members} members, {settings.intervals} intervals") if settings.members
         else Markup("")),
        ("set for all trials", escaped(fixed) if fixed else Markup("")),
        ("samples of a whole trial", escaped(format_samples(settings.total_samples))),
        ("chosen by", escaped(f"{settings.objective}; the test data was not used")),
    ]  # fmt: skip
    return section("How it was searched", facts(rows))
