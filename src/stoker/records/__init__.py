"""The nouns: frozen dataclasses of the standard library, each with a schema version, and one JSON codec."""

from stoker.records.artifact import (
    BATCH,
    ArtifactSource,
    Datatype,
    DynamicDim,
    EngineName,
    InputColumn,
    InputColumns,
    Manifest,
    Proof,
    ServingPrecision,
    TensorSpec,
    Tolerance,
)
from stoker.records.bottleneck import Achieved, Bottleneck, Bound, Kernel, KernelTable, RankTimes, SampledUpdates
from stoker.records.codec import digest, dumps, from_json, loads, to_json
from stoker.records.data_check import CleanList, Dropped
from stoker.records.device import FULL_PRECISIONS, Ceilings, Device, Environment, Precision, Price
from stoker.records.hardware import Hardware, MicroBenchmark, Pace, Timing
from stoker.records.launch import ENDED, Launch, LaunchState
from stoker.records.layout import ONE_PROCESS, Layout, MeshAxis, Schedule
from stoker.records.plan import (
    LARGEST_GRADIENT_ERROR,
    Basis,
    Breakdown,
    Candidate,
    Decision,
    Estimate,
    Forecast,
    Loader,
    Malloc,
    Measurement,
    OptimizerOffload,
    OptimizerStates,
    Plan,
    Rejection,
    Share,
)
from stoker.records.plan_schedule import PlanSwitch
from stoker.records.profile import NOT_COMPARED, Coupling, CouplingKind, Profile
from stoker.records.progress import (
    CheckpointManifest,
    Event,
    EventKind,
    FileDigest,
    Position,
    StoredPiece,
    StoredTensor,
)
from stoker.records.run import Calibration, DataClass, JobSpec, Quantity, Report, Run, RunStatus, Verdict
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
