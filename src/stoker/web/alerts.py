"""Alerts: a run has finished or failed, its loss is not a number, it is stalled, or costs more than it may.

An alert is a change of a run's row. Pages show it as a desktop notice; webhooks receive it as JSON.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from stoker.errors import BadJob
from stoker.records.codec import JSON
from stoker.units import format_money

_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alert:
    """One alert: `kind` is finished, failed, nan, stalled or over budget; `text` says it for people."""

    kind: str
    run: str
    name: str
    text: str

    def document(self) -> dict[str, JSON]:
        """As JSON; `text` alone is what most chat services show."""
        return {"kind": self.kind, "run": self.run, "name": self.name, "text": self.text}


def alerts_of(before: dict[str, Any], after: dict[str, Any], budget_usd: float | None = None) -> list[Alert]:
    """What is to be said of a run whose row changed; `budget_usd` is for runs that have no limit of their own.

    >>> [alert.text for alert in alerts_of({"state": "running"}, {"state": "stalled", "id": "a", "name": "a"})]
    ['a has stalled: it holds its lock and says nothing']
    """
    name, found = str(after.get("name")), []

    def say(kind: str, text: str) -> None:
        found.append(Alert(kind, str(after.get("id")), name, f"{name} {text}"))

    state, was = after.get("state"), before.get("state")
    if state != was and was is not None:
        if state == "finished":
            metric = after.get("metric")
            say(
                "finished",
                "has finished" + (f": {metric[0]} {metric[1]:.4g}" if metric and metric[1] is not None else ""),
            )
        elif state == "failed":
            say("failed", f"has failed: {after.get('failure') or 'no reason was recorded'}")
        elif state == "stalled":
            say("stalled", "has stalled: it holds its lock and says nothing")
        elif state in ("preempted", "lost"):
            say("failed", f"is {state}")
    if after.get("has_nan") and not before.get("has_nan") and before:
        say("nan", "has a loss that is not a number")
    limit = (after.get("launch") or {}).get("max_cost") or budget_usd
    cost, cost_before = after.get("cost_usd"), before.get("cost_usd")
    if limit and cost is not None and cost > limit and (cost_before is None or cost_before <= limit) and before:
        say("over budget", f"has cost {format_money(cost)}, the limit is {format_money(limit)}")
    return found


def checked_webhooks(addresses: Sequence[str]) -> tuple[str, ...]:
    """Addresses that alerts are sent to.

    Raises:
        BadJob: one is no HTTP address.
    """
    for address in addresses:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadJob(f"--webhook {address}: wanted an address such as https://example.org/hook")
    return tuple(addresses)


def send(alert: Alert, address: str) -> None:
    """POST an alert as JSON; one that cannot be delivered is logged, and costs nothing else."""
    body = json.dumps(alert.document()).encode()
    request = urllib.request.Request(  # noqa: S310 - its scheme was checked
        address, body, {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - likewise
            answer.read(1024)
    except (OSError, HTTPException) as problem:
        _log.warning("an alert was not delivered to %s: %s", urlsplit(address).hostname, problem)
