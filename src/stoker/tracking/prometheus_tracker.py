"""Prometheus: the newest values of a run, as a file for node_exporter's textfile collector, or at a Pushgateway.

Prometheus asks for values when it likes, and keeps their history itself; so only the newest of each is written. No
package is needed.
Source: Prometheus text exposition format 0.0.4; Pushgateway 1.x, `PUT /metrics/job/JOB{/LABEL/VALUE}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

from stoker.records.run import RunStatus
from stoker.store import write_atomic
from stoker.tracking.base import MetricPoint, RunDescription, output_path

_TIMEOUT_S = 10.0


class PrometheusRun:
    """The newest values of a run: a file that is replaced, or a group of a Pushgateway."""

    def __init__(self, about: RunDescription, path: Path | None, gateway: str) -> None:
        self._about, self._path = about, path
        self._group = f"{gateway.rstrip('/')}/metrics/job/stoker/run/{quote(about.run, safe='')}"
        self.id, self.where = (about.run, self._group) if path is None else (str(path), str(path))
        self._values: dict[str, float] = {}
        self._status: RunStatus = "unfinished"

    def log(self, points: list[MetricPoint]) -> None:
        """Replace the values by those of the newest points."""
        for point in points:
            own = {"samples": point.samples, "at_seconds": point.at}
            self._values |= own | dict(point.values) | own
        self._write()

    def go_back(self, samples: int) -> None:
        """Only the newest values are kept, and the next ones replace them."""

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """The status; the values stay as they were last."""
        self._status = status
        self._write()

    def close(self) -> None:
        """Nothing is open."""

    def _write(self) -> None:
        text = exposition(self._values, self._status, {"run": self._about.run, "name": self._about.job})
        if self._path is not None:
            write_atomic(self._path, text, what="metrics for Prometheus")
            return
        request = Request(self._group, data=text.encode(), method="PUT")  # noqa: S310 - http(s), as parsed
        request.add_header("Content-Type", "text/plain; version=0.0.4")
        with urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310 - likewise
            return


def open_run(about: RunDescription, where: str | None, known_id: str | None) -> PrometheusRun:
    """`metrics.prom` in the run's folder `tracking`; in the folder `where`, by the run's name; or the gateway there."""
    if where is not None and "://" in where:
        return PrometheusRun(about, None, where)
    path = output_path(about, where, known_id, name="metrics", ending=".prom")
    path.parent.mkdir(parents=True, exist_ok=True)
    return PrometheusRun(about, path, "")


def exposition(values: Mapping[str, float], status: RunStatus, labels: Mapping[str, str]) -> str:
    r"""The values as Prometheus reads them, one gauge each.

    >>> print(exposition({"train/loss": 0.5}, "unfinished", {"run": "a"}), end="")
    # TYPE stoker_train_loss gauge
    stoker_train_loss{run="a"} 0.5
    # TYPE stoker_status gauge
    stoker_status{run="a",status="unfinished"} 1
    """
    lines = []
    named = {f"stoker_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value for name, value in values.items()}
    named.pop("stoker_status", None)  # a second one would make the text unreadable; the run's own is below
    for name, value in named.items():
        lines += [f"# TYPE {name} gauge", f"{name}{_labels(labels)} {_number(value)}"]
    lines += ["# TYPE stoker_status gauge", f"stoker_status{_labels({**labels, 'status': status})} 1"]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
