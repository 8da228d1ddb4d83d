"""The nouns: frozen dataclasses of the standard library, each with a schema version, and one JSON codec."""

from stoker.records.codec import digest, dumps, from_json, loads, to_json
from stoker.records.device import Ceilings, Device, Environment, Precision
from stoker.records.estimate import Basis, Estimate
from stoker.records.job_spec import DataClass, JobSpec
from stoker.records.plan import (
    LARGEST_GRADIENT_ERROR,
    Candidate,
    Decision,
    Forecast,
    Loader,
    Measurement,
    Plan,
    Rejection,
)
from stoker.records.profile import Coupling, CouplingKind, Profile
from stoker.records.progress import CheckpointManifest, Event, EventKind, FileDigest, Position
from stoker.records.run import Calibration, Quantity, Report, Run, RunStatus, Verdict

__all__ = [
    "LARGEST_GRADIENT_ERROR", "Basis", "Calibration", "Candidate", "Ceilings", "CheckpointManifest", "Coupling",
    "CouplingKind", "DataClass", "Decision", "Device", "Environment", "Estimate", "Event", "EventKind", "FileDigest",
    "Forecast", "JobSpec", "Loader", "Measurement", "Plan", "Position", "Precision", "Profile", "Quantity",
    "Rejection", "Report", "Run", "RunStatus", "Verdict", "digest", "dumps", "from_json", "loads", "to_json",
]  # fmt: skip
