"""Which classes a classifier takes for which: a matrix of counts as a figure."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from stoker.records.examples import ExampleSet
from stoker.reporting.figures import Chart, as_chart, blank_figure
from stoker.reporting.palette import light

_MOST_LABELLED = 20
"""Of more classes cells have no numbers in them, only when pointed at."""


def confusion_chart(examples: ExampleSet) -> Chart | None:
    """The matrix, a row for each class that was wanted, by its share of that class; None where there is none."""
    counts = examples.confusion
    if counts is None:
        return None
    classes = _names(examples, len(counts))
    names = [html.escape(name) for name in classes]
    totals = [sum(row) for row in counts]
    shares = [[cell / total if total else 0.0 for cell in row] for row, total in zip(counts, totals, strict=True)]
    figure = blank_figure("found")
    figure.add_trace(
        go.Heatmap(
            z=shares, x=names, y=names, customdata=counts, zmin=0.0, zmax=1.0, showscale=False, xgap=1, ygap=1,
            colorscale=[[0.0, light("grid")], [1.0, light("blue")]],
            text=[[f"{cell:,}" if cell else "" for cell in row] for row in counts],
            texttemplate="%{text}" if len(counts) <= _MOST_LABELLED else "",
            hovertemplate="%{customdata:,} of %{y} taken for %{x} (%{z:.1%})<extra></extra>",
        )
    )  # fmt: skip
    category: dict[str, Any] = {"type": "category", "nticks": len(counts), "tickvals": names}
    figure.update_layout(
        hovermode="closest",
        xaxis=category | {"rangemode": "normal", "hoverformat": ""},
        yaxis=category | {"title": {"text": "wanted"}, "autorange": "reversed", "hoverformat": "", "showgrid": False},
    )
    return as_chart(f"confusion-{examples.split}", f"Confusion, {examples.split}", _words(examples, classes), figure)


def _words(examples: ExampleSet, names: list[str]) -> str:
    """The pair of classes that is confused most often."""
    counts = examples.confusion or ()
    pairs = [(cell, row, column) for row, cells in enumerate(counts) for column, cell in enumerate(cells)
             if row != column and cell]  # fmt: skip
    if not pairs:
        return "no class is taken for another"
    cell, row, column = max(pairs, key=lambda pair: (pair[0], -pair[1], -pair[2]))
    return f"most often {names[row]} taken for {names[column]}, {cell:,} times"


def _names(examples: ExampleSet, count: int) -> list[str]:
    """A name of its own for each class; else their numbers, for an axis makes one of two that are called alike."""
    is_named = len(examples.classes) == count == len(set(examples.classes))
    return list(examples.classes) if is_named else [str(number) for number in range(count)]
