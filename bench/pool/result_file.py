"""How results of this folder are written: what was measured, when, on which machine, and what else ran."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def write_result(
    name: str, what: str | None, values: dict[str, Any], *, arguments: str | None = None, path: Path | None = None
) -> Path:
    """Print a result without its rows, and write it; the file.

    `$BENCH_BESIDE` says what else ran on the machine.

    Args:
        name: of the module below `bench.pool`, and of the file.
        what: the module's docstring.
        values: the figures; those called `rows` are not printed.
        arguments: of the command; None: those of this process.
        path: another file than `bench/results/pool_NAME_DATE.json`.
    """
    given = " ".join(sys.argv[1:]) if arguments is None else arguments
    head = {
        "command": f"python -m bench.pool.{name} {given}".strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_at_the_end": os.getloadavg(),
        "beside": os.environ.get("BENCH_BESIDE", ""),
        "python": platform.python_version(),
    }
    shown = {key: value for key, value in values.items() if key != "rows"}
    print(json.dumps(head | shown, indent=1))
    path = path or RESULTS / f"pool_{name}_{head['date']}.json"
    path.write_text(json.dumps({"what": what, **head, **values}, indent=1) + "\n")
    print(path)
    return path
