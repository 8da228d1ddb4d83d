"""The table of docs/migrating.md, from the results of `bench.moving.compare`: `python -m bench.moving.table`."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.forecast.registration import RESULTS
from bench.train import results
from stoker.records.codec import JSON

PATH = RESULTS / "moving_2026-11-22.json"

_HEAD = (
    "| before | updates | largest difference of losses | Stoker's samples/s over its | as planned | lines of code |",
    "|---|---|---|---|---|---|",
)


def rows(content: dict[str, JSON]) -> list[str]:
    """A line for each case; ratios with their intervals of 95 %."""
    return [*_HEAD, *(_row(case) for case in content["cases"].values())]


def _row(case: dict[str, JSON]) -> str:
    gap, lines = case["largest_loss_difference"], case["lines_of_code"]
    name = case["what"] + "".join(f", {package} {number}" for package, number in list(case["versions"].items())[:1])
    cells = [
        name,
        str(case["updates"]),
        "0" if gap == 0 else f"{gap:.1e}",
        _ratio(case["ratio_same_micro_batch"]),
        _ratio(case["ratio_planned"]),
        f"{lines['before']} → {lines['after']}",
    ]
    return f"| {' | '.join(cells)} |"


def _ratio(interval: dict[str, JSON]) -> str:
    return f"{interval['median']:.2f}× ({interval['low']:.2f} to {interval['high']:.2f})"


def main(path: Path = PATH) -> None:
    """Print the table."""
    print("\n".join(rows(results.read(path))))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
