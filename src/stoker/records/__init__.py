"""The nouns: frozen dataclasses of the standard library, each with a schema version, and one JSON codec."""

from stoker.records.artifact import (
    BATCH,
    ArtifactSource,
    Datatype,
    DynamicDim,
    EngineName,
    Manifest,
    Proof,
    ServingPrecision,
    TensorSpec,
    Tolerance,
)
from stoker.records.bottleneck import Achieved, Bottleneck, Bound
from stoker.records.cleaning import CleanList, Dropped
from stoker.records.codec import digest, dumps, from_json, loads, to_json
from stoker.records.device import Ceilings, Device, Environment, Precision
from stoker.records.estimate import Basis, Estimate
from stoker.records.hardware import Hardware, MicroBenchmark, Pace, Timing
from stoker.records.job_spec import DataClass, JobSpec
from stoker.records.kernels import Kernel, KernelTable
from stoker.records.layout import ONE_PROCESS, Layout, Schedule
from stoker.records.plan import (
    LARGEST_GRADIENT_ERROR,
    Breakdown,
    Candidate,
    Decision,
    Forecast,
    Loader,
    Malloc,
    Measurement,
    Plan,
    Rejection,
    Share,
)
from stoker.records.price import Price
from stoker.records.profile import Coupling, CouplingKind, Profile
from stoker.records.progress import (
    CheckpointManifest,
    Event,
    EventKind,
    FileDigest,
    Position,
    StoredPiece,
    StoredTensor,
)
from stoker.records.rank_times import RankTimes, SampledUpdates
from stoker.records.run import Calibration, Quantity, Report, Run, RunStatus, Verdict
from stoker.records.service import ServiceSettings
from stoker.records.trace import (
    Category,
    Occurrence,
    Operation,
    Phase,
    Repetition,
    Segment,
    Storage,
    TensorShape,
    Trace,
    TraceSettings,
    Widened,
)

__all__ = [
    "BATCH", "LARGEST_GRADIENT_ERROR", "ONE_PROCESS", "Achieved", "ArtifactSource", "Basis", "Bottleneck", "Bound",
    "Breakdown", "Calibration", "Candidate", "Category", "Ceilings", "CheckpointManifest", "CleanList", "Coupling",
    "CouplingKind", "DataClass", "Datatype", "Decision", "Device", "Dropped", "DynamicDim", "EngineName",
    "Environment", "Estimate", "Event", "EventKind", "FileDigest", "Forecast", "Hardware", "JobSpec", "Kernel",
    "KernelTable", "Layout", "Loader", "Malloc", "Manifest", "Measurement", "MicroBenchmark", "Occurrence",
    "Operation", "Pace", "Phase", "Plan", "Position", "Precision", "Price", "Profile", "Proof", "Quantity",
    "RankTimes", "Rejection", "Repetition", "Report", "Run", "RunStatus", "SampledUpdates", "Schedule", "Segment",
    "ServiceSettings", "ServingPrecision", "Share", "Storage", "StoredPiece", "StoredTensor", "TensorShape",
    "TensorSpec", "Timing", "Tolerance", "Trace", "TraceSettings", "Verdict", "Widened", "digest", "dumps",
    "from_json", "loads", "to_json",
]  # fmt: skip
