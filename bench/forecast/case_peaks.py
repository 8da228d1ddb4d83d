"""Peak memory of training steps that were measured on GPUs, against its forecast.

    python -m bench.forecast.case_peaks CASES.csv MEASURED.json… [--only REGEX] [--out FILE]

`CASES.csv` is what `bench.forecast.measure_cases` measured, `MEASURED.json` what it wrote (`peak_bytes` and
`reserved_bytes` of each case). Nothing is fitted, and no GPU is needed; models of timm need timm.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.forecast.published import GIB, forecasts_of, planner_of
from stoker.devices import attached_devices, planned_devices
from stoker.jobs import load_job


def compared(case: dict[str, str], folder: Path, measured: dict[str, Any]) -> dict[str, Any]:
    """A case's peaks of allocated and reserved memory, forecast and measured [GiB], and errors [fractions]."""
    job, entry = load_job(folder / case["job"], {name: str(value) for name, value in json.loads(case["set"]).items()})
    (place,) = planned_devices(case["on"], attached_devices())
    forecasts, plan = forecasts_of(planner_of(job, entry), place, json.loads(case["plan"]))
    forecast = forecasts.forecast(plan)
    assert forecast.reserved_bytes is not None, "the place has a GPU"
    result: dict[str, Any] = {"id": case["id"]}
    for name, estimate in (("peak", forecast.peak_bytes), ("reserved", forecast.reserved_bytes)):
        num_bytes = measured[f"{name}_bytes"]
        result |= {
            f"{name}_forecast_gib": estimate.value / GIB,
            f"{name}_measured_gib": num_bytes / GIB,
            f"{name}_error": estimate.value / num_bytes - 1,
        }
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Forecast the peaks of the cases that were measured, print them, and write the document if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument("--only", default="", help="cases whose id this expression matches")
    parser.add_argument("--out", type=Path, help="write the document here")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in given.measured]
    measured = {one["id"]: one for document in documents for one in document["cases"] if "peak_bytes" in one}
    found: list[dict[str, Any]] = []
    with given.cases.open(newline="", encoding="utf-8") as file:
        for case in csv.DictReader(file):
            if case["id"] not in measured or not re.search(given.only, case["id"]):
                continue
            found.append(one := compared(case, given.cases.parent, measured[case["id"]]))
            words = (
                f"{name} {one[f'{name}_forecast_gib']:6.2f} of {one[f'{name}_measured_gib']:6.2f} GiB "
                f"{one[f'{name}_error']:+7.1%}"
                for name in ("peak", "reserved")
            )
            print(f"{one['id']:<40} {'   '.join(words)}", flush=True)
    if not found:
        return 1
    worst = {name: max(found, key=lambda one: abs(one[name])) for name in ("peak_error", "reserved_error")}
    overall = {
        name: {
            "mean_absolute": statistics.fmean(abs(one[name]) for one in found),
            "worst": worst[name][name],
            "worst_case": worst[name]["id"],
        }
        for name in worst
    }
    print(json.dumps(overall))
    if given.out:
        document = {
            "command": f"python -m bench.forecast.case_peaks {given.cases} {' '.join(map(str, given.measured))}"
            + (f" --only '{given.only}'" if given.only else ""),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "cases": found,
            "overall": overall,
        }
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
