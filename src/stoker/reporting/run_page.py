"""A run's report: the page of the run as `stoker ui` shows it, in one HTML file that needs nothing else.

Text is HTML, made by the templates that the live page has too. What is drawn is drawn by the live page's own scripts,
from the documents that the live page is sent, which stand in the file as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from stoker.records import Report, to_json
from stoker.records.codec import JSON
from stoker.records.run import ExampleSet
from stoker.reporting import history, pages, summary, wording
from stoker.reporting.folded_log import COLUMNS, FoldedLog
from stoker.reporting.history import price_of
from stoker.reporting.run_documents import confusion_document, run_document, series_document
from stoker.reporting.run_sections import run_sections

_MODULES = ("vendor/uPlot.js", "format.js", "dom.js", "chart.js", "run.js", "frozen.js")
_PX = 700
"""Pixels of a chart that series are made for, as by the live page: twice as many points at most."""
_SCALARS_PX = 2000
"""Pixels of all charts of logged scalars together."""
_MOST_SCALARS = 60
_MOST_TEXT = 100_000
"""Characters of all texts that the run logged, as JSON; the newest stay."""


def render_html(report: Report, examples: Sequence[ExampleSet] = ()) -> str:
    """The report as a page of a quarter of a megabyte and more with pictures; a run without any chart has no scripts.

    `examples` are samples of held-out sets, and what the trained weights made of them.
    """
    log = FoldedLog()
    log.take(report.events)
    confusion = confusion_document(examples)
    is_drawn = bool(log.progress.length or log.evaluations or log.scalars or log.texts or confusion)
    values = {
        "title": report.run.name,
        "lines": summary.summary_lines(report),
        **run_sections(report, examples, profile_folder="profile"),
    }
    return pages.render_with_scripts(
        "run",
        (pages.bundled(*_MODULES),) if is_drawn else (),
        _documents(report, log, confusion) if is_drawn else "",
        values,
        more_policy="; require-trusted-types-for 'script'; trusted-types stoker",
    )


def _documents(report: Report, log: FoldedLog, confusion: JSON) -> str:
    """The page's documents of the run as JSON: its state, its series over samples and time, confusion.

    Money is time by its price, which the page reckons itself.
    """
    decision = report.decision
    chosen: JSON = None
    if decision is not None:
        chosen = {
            "candidates": [to_json(decision.chosen)],
            "device": decision.device,
            "is_settled": decision.is_settled,
        }
    price_per_h = price_of(chosen)
    if report.launch is not None and report.launch.price_per_h:
        price_per_h = report.launch.price_per_h
    state = run_document(_row(report, log, price_per_h), log, chosen)
    marks = [event for event in state["events"] if event["kind"] != "evaluated"]  # the text lists evaluations
    state |= {"events": marks, "images": [], "texts": _newest(state["texts"]), **_in_words(report)}
    scalars = state["scalars"][:_MOST_SCALARS]
    series = {
        over: series_document(
            log, over=over, px=_PX, scalars=scalars, scalar_px=min(_PX, _SCALARS_PX // max(1, len(scalars)))
        )
        for over in ("samples", "wall_s")
    }
    exact = pages.compact_json({"state": state, "confusion": confusion})  # times since 1970 have many figures
    return f'{exact[:-1]},"series":{pages.compact_json(series, figures=6)}}}'


def _row(report: Report, log: FoldedLog, price_per_h: float | None) -> dict[str, JSON]:
    """The summary of the run, by the names of the live page's rows."""
    run, wall_s, rows = report.run, summary.wall_seconds(report), log.progress.rows
    samples = history.samples_done(report)
    measured = {row.quantity: row.measured for row in summary.forecast_rows(report)}
    latest = {name: float(rows[-1, index]) for index, name in enumerate(COLUMNS)} if len(rows) else {}
    split_s = float(np.nansum(rows[:, COLUMNS.index("split_s")])) if len(rows) else 0.0
    waited_s = float(np.nansum(rows[:, COLUMNS.index("data_s")])) if len(rows) else 0.0
    named = wording.headline_metric(run.metrics)
    return {
        "name": run.name,
        "status": run.status,
        "state": "stopped" if run.status == "unfinished" else run.status,
        "samples": samples,
        "total_samples": run.total_samples,
        "metric": list(named) if named else None,
        "wall_s": wall_s,
        "samples_per_s": measured.get("throughput") or (samples / wall_s if wall_s else None),
        "resident_bytes": latest.get("resident_bytes"),
        "allocated_bytes": latest.get("allocated_bytes"),
        "waiting": waited_s / split_s if split_s else None,
        "device": report.device.model if report.device else "",
        "price_per_h": price_per_h,
        "cost_usd": wall_s / 3600 * price_per_h if price_per_h else None,
        "failure": run.failure,
    }


def _in_words(report: Report) -> dict[str, JSON]:
    """The head's text below the result, and on the machine."""
    events, run = history.live_history(report.events), report.run
    named = wording.headline_metric(run.metrics)
    split = named[0].split("/")[0] if named else ""
    others = {n: v for n, v in run.metrics.items() if named and n != named[0] and n.startswith(f"{split}/")}
    epochs = history.samples_done(report) / report.spec.num_train if report.spec.num_train else 0.0
    notes = [
        summary.best_words(events),
        wording.format_metrics(others),
        f"Ended before its time: {run.ended_early}." if run.ended_early else "",
        f"{epochs:.3g} epochs, {history.updates_done(report):,} updates",
    ]
    machine = None
    if report.device is not None:
        threads = f", {text}" if (text := _threads(report)) else ""
        size = report.decision.chosen.plan.layout.world_size if report.decision else 1
        machine = f"{f'{size} processes, ' if size > 1 else ''}{report.device.cores} cores{threads}"
    return {"notes": [note for note in notes if note], "machine": machine}


def _threads(report: Report) -> str:
    """The threads that trained, with the share of the samples of each number if it changed."""
    shares: dict[int, float] = {}
    for stretch in history.plans_in_force(report):
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


def _newest(texts: list[JSON]) -> list[JSON]:
    """The last texts that have together as many characters as a report holds."""
    kept, room = list[JSON](), _MOST_TEXT
    for text in reversed(texts):
        room -= len(json.dumps(text[2]))
        if room < 0:
            break
        kept.append(text)
    return kept[::-1]
