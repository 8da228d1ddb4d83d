"""What a run is told by: its events folded into a summary for the terminal and a page for the browser."""

from stoker.reporting.display import choose_display
from stoker.reporting.html import render_html
from stoker.reporting.notebook import notebook_display, run_html
from stoker.reporting.plots import plot
from stoker.reporting.summary import (
    ForecastRow,
    TimeShare,
    forecast_rows,
    live_history,
    summary_lines,
    time_split,
)

__all__ = [
    "ForecastRow", "TimeShare", "choose_display", "forecast_rows", "live_history", "notebook_display", "plot",
    "render_html", "run_html", "summary_lines", "time_split",
]  # fmt: skip
