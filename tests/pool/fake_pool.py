"""A pool in memory for one lease at a time: what agents post, and blobs in a folder; nothing is checked."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stoker.errors import PlaceUnreachable
from stoker.pool import events as on
from stoker.pool.client import Missing
from stoker.pool.shown_lease import ShownLease
from stoker.records.codec import from_json

_LEASE: dict[str, Any] = {
    "lease_id": "job.0",
    "offer_id": "box",
    "renter": "a" * 64,
    "agent": "a" * 64,
    "delegate": "f" * 64,
    "order": "0" * 64,
    "device": "cpu",
    "determinism_class": "",
    "rate_per_hour": 0,
    "deposit": 0,
    "bond": 0,
    "window_s": 3600,
    "verify_fraction": 0.0,
    "check_fraction": 0.0,
    "value_per_hour": 0,
    "forecast": {"hours": 1.0, "credits": 0},
    "promised_s": 0.0,
    "most_s": 0.0,
}


def shown(**fields: Any) -> ShownLease:
    """A lease with these fields, as JSON has them; what a test keeps besides of a block is left out."""
    blocks = [{name: one[name] for name in one if name != "plain"} for one in fields.pop("commitments", ())]
    return from_json(_LEASE | fields | {"commitments": blocks}, ShownLease)


class FakePool:
    """Has the calls of `PoolClient` that agents make; `is_away` makes all of them fail."""

    def __init__(self, folder: Path, key: str = "a" * 64) -> None:
        self.folder, self.key, self.is_away = folder, SimpleNamespace(public=key), False
        self.address = SimpleNamespace(key="f" * 64)
        self.peer: Any = None
        self.sent_bytes = 0
        self.posted: list[on.Body] = []
        self.documents: dict[str, dict[str, Any]] = {}
        self.refusals: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def post(self, body: on.Body, **_: Any) -> None:
        """Keep an event."""
        self._answer()
        if self.refusals:
            raise on.Refused(self.refusals.pop())
        self.posted.append(body)
        lease = self.documents.get(getattr(body, "lease_id", ""))
        if lease is None:
            return
        match body:
            case on.Committed():
                fields = ("block", "update", "state", "blob", "seal")
                lease["commitments"].append({name: getattr(body, name) for name in fields})
            case on.Beat():
                lease |= {"beat_index": body.index, "running_s": body.running_s, "samples": body.samples}
            case on.Accepted():
                lease["state"] = "running"
            case on.Closed():
                lease |= {"state": "closed", "reason": body.reason, "closed_by": self.key.public}
            case on.Finished():
                lease |= {"state": "closed", "reason": "finished", "result": body.result}
            case _:
                pass

    def of(self, kind: type[on.Body]) -> list[Any]:
        """Posted bodies of a kind."""
        return [body for body in self.posted if isinstance(body, kind)]

    def add_lease(self, lease_id: str, order: str, determinism_class: str = "") -> dict[str, Any]:
        """A lease that waits to be accepted."""
        self.documents[lease_id] = {
            "lease_id": lease_id,
            "order": order,
            "state": "funded",
            "reason": "",
            "commitments": [],
            "challenges": [],
            "beat_index": -1,
            "running_s": 0,
            "uncommitted_s": 0,
            "samples": 0,
            "agent": self.key.public,
            "result": "",
            "offer_id": "box",
            "determinism_class": determinism_class,
            "check_fraction": 0.0,
            "paid_s": 0,
            "rate_per_hour": 0,
            "renter": self.key.public,
            "outcome": "",
            "closed_by": "",
            "closed_s": 0.0,
            "delegate": self.address.key,
            "bond": 0,
            "window_s": 3600,
        }
        return self.documents[lease_id]

    def lease(self, lease_id: str) -> ShownLease:
        """One lease."""
        self._answer()
        if lease_id not in self.documents:
            raise Missing(f"there is no lease {lease_id}")
        return shown(**self.documents[lease_id])

    def leases(self, **_: str) -> list[ShownLease]:
        """All leases."""
        self._answer()
        return [shown(**lease) for lease in self.documents.values()]

    def state(self, what: str, **_: str) -> Any:
        """Nothing."""
        self._answer()
        return []

    def rules(self) -> on.Founded:
        """Internal credits."""
        self._answer()
        return on.Founded(name="fake")

    def work(self, **_: Any) -> dict[str, Any]:
        """What waits for the agent."""
        self._answer()
        waiting = [shown(**lease) for lease in self.documents.values() if lease["state"] == "funded"]
        live = [name for name, lease in self.documents.items() if lease["state"] in ("funded", "running", "reclaiming")]
        return {"leases": waiting, "challenges": [], "live": live}

    def put_blob(self, source: bytes | Path) -> str:
        """Keep a blob."""
        self._answer()
        content = source if isinstance(source, bytes) else source.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / digest).write_bytes(content)
        return digest

    def get_blob(self, digest: str, target: Path, *, most_bytes: int | None = None, **_: Any) -> None:
        """Copy a blob."""
        self._answer()
        shutil.copyfile(self.folder / digest, target)

    def _answer(self) -> None:
        if self.is_away:
            raise PlaceUnreachable("the pool is away")
