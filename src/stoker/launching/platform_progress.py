"""Reports a run's progress to Kubeflow's Trainer: `python -m stoker.launching.platform_progress RUN_DIR`.

What: the newest progress of the run's log, posted to the status endpoint that the Trainer names in the pod's
environment; it becomes `status.trainerStatus` of the TrainJob, which dashboards show.
Use when: KUBEFLOW_TRAINER_STATUS_URL is set; Stoker's own pods start it then. Costs: a request every 15 s while
something is new. What the endpoint answers never touches the run.
Source: KEP-2779 of Kubeflow Trainer; request body UpdateTrainJobStatusRequest of trainer.kubeflow.org/v1alpha1.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from stoker.launching.at_place import newest_events

URL, CA, TOKEN = "KUBEFLOW_TRAINER_STATUS_URL", "KUBEFLOW_TRAINER_STATUS_CA_CERT", "KUBEFLOW_TRAINER_STATUS_TOKEN"
EVERY_S = 15.0
_METRICS = ("loss", "samples_per_s", "lr")


def status_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """The request's body for a `progress` event.

    >>> event = {"kind": "progress", "at": 0, "fields": {"samples": 5, "total_samples": 20, "eta_s": 3, "loss": 0.5}}
    >>> status_of(event)["trainerStatus"]["metrics"]
    [{'name': 'loss', 'value': '0.5'}]
    """
    at, fields = datetime.fromtimestamp(event["at"], UTC).isoformat(timespec="seconds"), event["fields"]
    status: dict[str, Any] = {
        "progressPercentage": min(100, int(100 * fields["samples"] / max(1, fields["total_samples"]))),
        "metrics": [{"name": name, "value": f"{fields[name]}"} for name in _METRICS if fields.get(name) is not None],
        "lastUpdatedTime": at.replace("+00:00", "Z"),
    }
    if isinstance(fields.get("eta_s"), int | float):
        status["estimatedRemainingSeconds"] = max(0, round(fields["eta_s"]))
    return {"trainerStatus": status}


def post(body: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Send a status.

    Raises:
        OSError: the endpoint does not answer, or refuses.
    """
    request = Request(environ[URL], data=json.dumps(body).encode(), method="POST")  # noqa: S310  # the platform's own
    request.add_header("Content-Type", "application/json")
    request.add_header("Authorization", f"Bearer {Path(environ[TOKEN]).read_text(encoding='utf-8').strip()}")
    context = ssl.create_default_context(cafile=environ[CA]) if environ[URL].startswith("https:") else None
    with urlopen(request, timeout=10.0, context=context):  # noqa: S310  # likewise
        return


def main(directory: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Post what is new until this program is ended."""
    said: dict[str, Any] | None = None
    while True:
        event = next(newest_events(directory / "events.jsonl", "progress"), None)
        if event is not None and event != said:
            try:
                post(status_of(event), environ)
                said = event
            except (OSError, ValueError, KeyError) as error:
                print(f"progress was not reported to the platform: {error}", file=sys.stderr)  # noqa: T201  # a pod's log
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
