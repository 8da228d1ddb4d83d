"""A run's report: the page of the run as `stoker ui` shows it, in one HTML file that needs nothing else.

Text is HTML, made by the templates that the live page has too. What is drawn is drawn by the live page's own scripts,
from the documents that the live page is sent, which stand in the file as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from stoker.records import Report, to_json
from stoker.records.codec import JSON
from stoker.records.run import ExampleSet
from stoker.reporting import pages
from stoker.reporting.folded_log import FoldedLog
from stoker.reporting.run_documents import confusion_document, price_of, run_document, series_document
from stoker.reporting.run_sections import headline, run_sections

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
    values = {"title": report.run.name, **headline(report), **run_sections(report, examples, profile_folder="profile")}
    return pages.render_with_scripts(
        "run",
        (pages.bundled(*_MODULES),) if is_drawn else (),
        _documents(report, log, confusion) if is_drawn else "",
        values,
        more_policy="; require-trusted-types-for 'script'; trusted-types stoker",
    )


def _documents(report: Report, log: FoldedLog, confusion: JSON) -> str:
    """What the page would be sent of the run as JSON: its state, its series over samples and time, confusion.

    Money is time by its price, which the page reckons itself.
    """
    run, decision = report.run, report.decision
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
    row: dict[str, JSON] = {
        "name": run.name, "status": run.status, "state": run.status, "samples": run.samples,
        "total_samples": run.total_samples, "price_per_h": price_per_h,
    }  # fmt: skip
    state = run_document(row, log, chosen)
    marks = [one for one in state["events"] if one["kind"] != "evaluated"]  # all are told in the text
    state |= {"events": marks, "images": [], "texts": _newest(state["texts"])}
    scalars = state["scalars"][:_MOST_SCALARS]
    series = {
        over: series_document(
            log, over=over, px=_PX, scalars=scalars, scalar_px=min(_PX, _SCALARS_PX // max(1, len(scalars))),
        )
        for over in ("samples", "wall_s")
    }  # fmt: skip
    exact = pages.compact_json({"state": state, "confusion": confusion})  # times since 1970 have many figures
    return f'{exact[:-1]},"series":{pages.compact_json(series, figures=6)}}}'


def _newest(texts: list[JSON]) -> list[JSON]:
    """The last texts that have together as many characters as a report holds."""
    kept, room = list[JSON](), _MOST_TEXT
    for text in reversed(texts):
        room -= len(json.dumps(text[2]))
        if room < 0:
            break
        kept.append(text)
    return kept[::-1]
