"""Estimates, plans, their forecasts, trials and the planner's decision: how a Job is executed, never what it learns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from stoker.records.device import Precision, Price
from stoker.records.layout import ONE_PROCESS, Layout
from stoker.records.profile import Coupling

Basis = Literal["measured here", "calibrated", "roofline", "datasheet", "unknown"]
"""The basis of an estimate, the surest first."""

LARGEST_GRADIENT_ERROR = 0.25
"""Relative error of a gradient against fp32 beyond which a reduced precision is not used [fraction].

A third of the spread between gradients of different batches, which on the demo's first weights is 0.65 to 0.77 of the
gradient itself; later it is larger still (docs/log.md).
"""

_MOST = {
    "micro_batch": 2**40,
    "loss_chunks": 2**31,
    "threads": 2**16,
    "prefetch_batches": 2**16,
    "checkpointed_blocks": 2**31,
    "num_workers": 2**16,
    "checkpoint_every_s": 1e9,
}
"""Upper limits of a plan's numbers: larger ones are a mistake, or an attack."""

Malloc = Literal["retained", "default", "mapped"]
"""Memory of a process on a CPU: kept once allocated, as the C library decides, or given back block by block."""

Checkpointing = Literal["full", "selective"]
"""The operations that a checkpointed block recomputes: all, or all but products, convolutions, dropless attention."""

Loader = Literal["device", "memory", "inline", "workers"]
"""Where batches come from: gathered from arrays, on the device or in the host's memory; or items fetched in the
training process, or by workers."""

OptimizerStates = Literal["full", "bf16", "8bit"]
"""The form of an optimiser's moments: the dtype of the weights, or fewer bits, which the job has to allow."""

OptimizerOffload = Literal["none", "state", "gradients"]
"""What is kept in the host's memory, and updated by its CPU: nothing; the optimiser's state, with the masters of
weights that are bf16 on the device; that, and the sums of gradients over micro-batches too."""

STATES_BLOCK, LEAST_STATES = 256, 4096
"""Values that share a scale in 8-bit moments; and those of a parameter from which its moments are kept in fewer bits.

Source: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861; its code has blocks of
256, and leaves smaller tensors in fp32.
"""

IN_FLIGHT_BYTES = 2**28
"""Gradients on their way to the host that a device holds at most, where one alone is no more [bytes]; the backward pass
waits for the oldest. At 25 GB/s they take 11 ms."""

PIECE = 2**24
"""Values of a gradient that are added at once to what the host has of its sum, so that temporaries stay small."""

PINNED_BYTES, ALIGNED_BYTES = 2**28, 64
"""Pinned memory that optimizer offload has at once, and multiples of which its tensors begin at in it [bytes].
PyTorch's allocator rounds pinned memory up to a power of two."""

STAGED_BYTES = 2**26
"""Masters that optimizer offload updates in one call, whose gradients are in their dtype until then [bytes]."""

LEAST_OFFLOADED_BYTES = 2**12
"""Inputs of checkpointed blocks from which on they are worth a copy to the host [bytes]."""

VALUES_AT_ONCE = {"cpu": 2**16, "cuda": 2**23}
"""Values of a parameter whose moments of fewer bits are updated at once, so that temporaries stay small."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`value` in `unit`, between `low` and `high` in 8 cases of 10, resting on `basis`."""

    schema: ClassVar[int] = 1
    value: float
    low: float
    high: float
    unit: str
    basis: Basis

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"an estimate must be within its interval, got {self.low} <= {self.value} <= {self.high}")

    def scaled(self, factor: float, unit: str | None = None) -> Estimate:
        """The estimate of `factor` times the quantity."""
        ends = sorted((self.low * factor, self.high * factor))
        return Estimate(value=self.value * factor, low=ends[0], high=ends[1], unit=unit or self.unit, basis=self.basis)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to execute a Job.

    `micro_batch` is the most samples that go through the model at once in a process; an optimiser batch is cut into
    that many (the last may be smaller). `layout` is over how many processes, and how; `device` is the first one's.
    `checkpointed_blocks` of the model's repeated blocks, the first ones, keep only their inputs and compute the rest
    again in the backward pass; where `checkpointing` is `selective` they keep what products, convolutions and attention
    without dropout gave as well, and recompute only the operations between those. Under `activation_offload` inputs of
    checkpointed blocks, but for the last one's, are in the host's memory between the two passes. `loss_chunks` is in
    how many parts a micro-batch's tokens go through output layer and loss. `optimizer_states` is what the optimiser's
    moments are kept in; fewer bits have one implementation, `default`. Under `optimizer_offload` weights of precision
    bf16 are bf16 on the device, their masters fp32 on the host. `malloc` is how the host's memory is had: `retained`
    keeps what the system gave once, `mapped` asks for each large tensor and gives it back at once. `captured` repeats
    the operations of a pass as they were noted once, without autograd. `checkpoint_every_s` is the time between
    checkpoints [s]; where `device_mtbf_h` is given, the mean time of one device between two failures [h], it is a
    forecast, and follows from that and what saving takes once that is measured.
    """

    schema: ClassVar[int] = 1
    device: str
    micro_batch: int
    precision: Precision = "fp32"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    optimizer_implementation: Literal["default", "foreach", "fused"] = "default"
    optimizer_states: OptimizerStates = "full"
    optimizer_offload: OptimizerOffload = "none"
    checkpointed_blocks: int = 0
    checkpointing: Checkpointing = "full"
    activation_offload: bool = False
    loss_chunks: int = 1
    compile: bool = False
    captured: bool = False
    threads: int = 1
    malloc: Malloc = "default"
    loader: Loader = "memory"
    num_workers: int = 0
    prefetch_batches: int = 2
    checkpoint_every_s: float = 30.0
    device_mtbf_h: float | None = None
    layout: Layout = ONE_PROCESS

    def __post_init__(self) -> None:
        for name in ("micro_batch", "loss_chunks", "threads", "prefetch_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most:,}, got {getattr(self, name)}")
        if self.checkpointed_blocks < (least := int(self.checkpointing == "selective")):
            where = f" where checkpointing is {self.checkpointing}" if least else ""
            raise ValueError(f"checkpointed_blocks must be at least {least}{where}, got {self.checkpointed_blocks}")
        if self.num_workers < 0 or (self.loader == "workers") != (self.num_workers > 0):
            raise ValueError(f"loader {self.loader!r} does not go with num_workers={self.num_workers}")
        if self.captured:
            self._require_capturable()
        self._require_layout_of_precision()
        if self.optimizer_states != "full" and self.optimizer_implementation != "default":
            raise ValueError(
                f"{self.optimizer_states} optimizer_states have one implementation, default, and no "
                f"{self.optimizer_implementation} one"
            )
        if problem := self._optimizer_offload_problem() or self._activation_offload_problem():
            raise ValueError(problem)
        if not self.checkpoint_every_s > 0:
            raise ValueError(f"checkpoint_every_s must be positive, got {self.checkpoint_every_s}")
        if self.device_mtbf_h is not None and not self.device_mtbf_h > 0:
            raise ValueError(f"device_mtbf_h must be positive, got {self.device_mtbf_h}")

    @property
    def is_offloaded(self) -> bool:
        """Whether the optimiser's state is in the host's memory."""
        return self.optimizer_offload != "none"

    @property
    def uses_host_memory(self) -> bool:
        """Whether the host's memory holds what a GPU's would otherwise: the optimiser's state, or activations."""
        return self.is_offloaded or self.activation_offload

    @property
    def intra_op_threads(self) -> int | None:
        """Threads that a process computes with; None: all that PyTorch takes, where the host updates weights."""
        return None if self.is_offloaded else self.threads

    def _optimizer_offload_problem(self) -> str | None:
        """What a plan has to be for its optimizer_offload, and this one is not; None if there is nothing."""
        if not self.is_offloaded:
            return None
        layout, passes = self.layout, "captured" if self.captured else "compiled"
        problems = {
            f"GPUs, and the plan's device is {self.device}, whose memory is the host's": self.device == "cpu",
            f"one process, and the layout is {layout.in_words()}: shards divide the state over the processes, and "
            "replicas would each keep a whole one in the same host's memory": layout.world_size > 1,
            f"passes by autograd, whose gradients come one by one, and these are {passes}": self.captured
            or self.compile,
            "fp32, tf32, bf16 and fp64; under fp16 an update is made again from gradients that are still on the "
            "device": self.precision == "fp16",
            "fp32, tf32, bf16 and fp64, and the precision is fp8": self.precision == "fp8",
            f"full optimizer_states, not {self.optimizer_states}: fewer bits save the device's "
            "memory": self.optimizer_states != "full",
            f"contiguous weights, not {self.memory_format}": self.memory_format != "contiguous",
        }
        return next((f"optimizer_offload is for {one}" for one, holds in problems.items() if holds), None)

    def _activation_offload_problem(self) -> str | None:
        """What a plan has to be for its activation_offload, and this one is not; None if there is nothing."""
        if not self.activation_offload:
            return None
        problems = {
            f"GPUs, and the plan's device is {self.device}, whose memory is the host's": self.device == "cpu",
            "checkpointing full, of which inputs of blocks are all that is kept, and this one is "
            f"{self.checkpointing}": self.checkpointing != "full",
            f"checkpointed_blocks of 2 or more, and this plan has {self.checkpointed_blocks}: inputs of all but the "
            "last go to the host": self.checkpointed_blocks < 2,
            "plans that are not compiled: what compiled blocks keep is the compiler's choice": self.compile,
            f"one process, and the layout is {self.layout.in_words()}": self.layout.world_size > 1,
        }
        return next((f"activation_offload is for {one}" for one, holds in problems.items() if holds), None)

    def _require_capturable(self) -> None:
        if self.compile or self.checkpointed_blocks or self.loss_chunks > 1:
            raise ValueError("a captured pass goes neither with compile, nor with checkpointed_blocks or loss_chunks")
        if self.precision == "fp16":
            raise ValueError("a captured pass does not go with fp16, whose loss scale changes")
        if self.layout.world_size > 1:
            raise ValueError("a captured pass is one process's")

    def _require_layout_of_precision(self) -> None:
        layout = self.layout
        if self.precision == "fp8" and not layout.has_fp8:
            raise ValueError(
                "precision fp8 is for one process, replicas and shards so far, and the layout is "
                f"{layout.in_words()}; bf16 goes with all layouts"
            )

    def without_checkpointing(self) -> Plan:
        """The same plan, in which nothing is computed twice."""
        return replace(self, checkpointed_blocks=0, checkpointing="full", activation_offload=False)

    def checkpointing_in_words(self) -> str:
        """`12 checkpointed blocks`, or `12 selectively checkpointed blocks`."""
        how = "selectively " if self.checkpointing == "selective" else ""
        return f"{self.checkpointed_blocks} {how}checkpointed block{'' if self.checkpointed_blocks == 1 else 's'}"

    def offload_in_words(self) -> str:
        """`optimiser on the host`, or `optimiser and gradients on the host`, or `inputs of blocks on the host`."""
        parts = ["optimiser"] if self.is_offloaded else []
        parts += ["gradients"] if self.optimizer_offload == "gradients" else []
        parts += ["inputs of blocks"] if self.activation_offload else []
        return f"{' and '.join(parts)} on the host"

    def on_host_in_words(self) -> str:
        """What the host's memory holds of an update, as the beginning of a sentence."""
        parts = ["the optimiser's state, masters and gradients"] if self.is_offloaded else []
        parts += ["inputs of blocks"] if self.activation_offload else []
        copied = ", with the copy that a checkpoint is written from" if self.is_offloaded else ""
        return " and ".join(parts) + copied

    def in_words(self) -> str:
        """The choices on one line: `bf16 · micro-batch 512 · channels-last · 2 threads`."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        workers = f"{self.num_workers} loader worker{'s' if self.num_workers > 1 else ''}"
        loader = workers if self.num_workers else f"{self.loader} loader"
        layout = self.memory_format.replace("_", "-")
        parts = [self.layout.in_words()] if self.layout.world_size > 1 else []
        parts += [self.precision, f"micro-batch {self.micro_batch}", layout, threads, loader]
        if self.optimizer_states == "full":
            parts.append(f"{self.optimizer_implementation} optimiser")
        else:
            parts.append(f"{self.optimizer_states.replace('8bit', '8-bit')} optimiser states")
        if self.uses_host_memory:
            parts.append(self.offload_in_words())
        parts += self._computing_in_words()
        if self.malloc != "default":
            parts.append(f"{self.malloc} memory")
        return " · ".join(parts)

    def in_brief(self) -> str:
        """What is unusual of it, where there is little room: `bf16 · micro-batch 32 · channels-last`."""
        parts = [self.precision, f"micro-batch {self.micro_batch}"]
        if self.memory_format != "contiguous":
            parts.append(self.memory_format.replace("_", "-"))
        parts += self._computing_in_words()
        if self.optimizer_implementation != "default":
            parts.append(f"{self.optimizer_implementation} optimiser")
        if self.optimizer_states != "full":
            parts.append(f"{self.optimizer_states.replace('8bit', '8-bit')} optimiser states")
        if self.uses_host_memory:
            parts.append(self.offload_in_words())
        if self.device == "cpu":
            parts.append(f"{self.threads} thread{'' if self.threads == 1 else 's'}")
        if self.num_workers:
            parts.append(f"{self.num_workers} loader worker{'' if self.num_workers == 1 else 's'}")
        return " · ".join(parts)

    def _computing_in_words(self) -> list[str]:
        """How passes are computed, where it is not the usual way."""
        parts = [self.checkpointing_in_words()] if self.checkpointed_blocks else []
        parts += [f"loss in {self.loss_chunks} chunks"] if self.loss_chunks > 1 else []
        return parts + ["compiled"] * self.compile + ["captured"] * self.captured


def precision_problem(precision: Precision, numerics: Collection[str]) -> str | None:
    """Why a job of these `numerics` does not allow a plan of this precision; None if it does."""
    if precision not in ("fp16", "fp8") or precision in numerics:
        return None
    return f'precision {precision} is for jobs that allow it: Job(numerics=["{precision}"])'


def states_problem(plan: Plan, numerics: Collection[str]) -> str | None:
    """Why a job of these `numerics` does not allow the plan's optimizer_states; None if it does."""
    states = plan.optimizer_states
    if states == "full" or f"{states}-states" in numerics:
        return None
    return f'{states} optimizer_states are for jobs that allow them: Job(numerics=["{states}-states"])'


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of a plan. `total_s` is training, evaluation, checkpoints and failures together, after planning.

    `step_s` is the time of one update. `peak_bytes` is the resident memory of the whole process on a CPU, allocated
    memory on a GPU, where `reserved_bytes` is what the allocator then holds of the device; `probability_it_fits` is
    theirs. `energy_kwh` is the device's and its share of the building's, `co2_kg` that of the grid assumed,
    `cost_usd` at `Candidate.price`; each None where it is not known.
    """

    schema: ClassVar[int] = 2
    step_s: Estimate
    samples_per_s: Estimate
    evaluate_s: Estimate
    checkpoint_s: Estimate
    total_s: Estimate
    peak_bytes: Estimate
    total_samples: int
    total_updates: int
    evaluations: int = 0
    """How often held-out data are evaluated, the weights kept once more at the end included."""
    reserved_bytes: Estimate | None = None
    probability_it_fits: float | None = None
    energy_kwh: Estimate | None = None
    co2_kg: Estimate | None = None
    cost_usd: Estimate | None = None
    gradient_error: float | None = None
    """Relative error of the gradient against fp32 on real batches [fraction]; None where the plan is fp32, or where it
    was not measured."""
    compile_s: Estimate | None = None
    """The time of compiling, once; part of `total_s` unless the plan was compiled when it was tried."""
    exposed_s: Estimate | None = None
    """The exposed time of an update's messages between processes [s], part of `step_s`; None for one process."""
    hidden_s: Estimate | None = None
    """The time of them that overlaps with arithmetic [s], no part of `step_s`."""
    communication_bytes: int | None = None
    """Bytes that a process sends the others in an update; None for one process. `peak_bytes` is that of one."""
    checkpoint_every_s: float | None = None
    """The time between checkpoints that `total_s` rests on [s]."""
    trials_s: float | None = None
    """The time of trying plans in the run beyond its updates at the settled rate [s], part of `total_s`."""
    lost_s: float | None = None
    """The expected cost of failures [s], part of `total_s`; None where that is too little to matter."""

    @property
    def seconds_per_sample(self) -> float:
        """Time of the whole run per sample [s].

        The measure for comparing plans and devices: in a run of a stated time all take as long, and the faster ones
        train on more samples.
        """
        return self.total_s.value / max(1, self.total_samples)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Results of a short trial of a plan on this device.

    `update_s` are the times of single updates, data included [s]; `state_bytes` are weights, gradients, optimiser state
    and average; `gradient_error` is the gradient's relative error against fp32 (None where the plan is fp32).
    `compile_s` is what compiling took [s], part of `took_s`; `not_compiled` says why a compiled plan ran uncompiled.
    """

    schema: ClassVar[int] = 1
    plan: Plan
    samples_per_update: int
    update_s: tuple[float, ...]
    evaluate_s_per_sample: float
    peak_bytes: int
    state_bytes: int
    took_s: float
    gradient_error: float | None = None
    compile_s: float = 0.0
    not_compiled: str | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan on a device, and its forecast. `device` is its name in the catalogue, or `cpu`, `cuda:0` if it is here.

    `memory_bytes` is what the device has, `is_here` whether it is attached; `untried` is the forecast before trials
    confirmed the plan (None: it is `forecast`, or there was none); `price` is what an hour of it costs (None:
    nothing, or no one offers it); `why` gives in a few words the reason for or against it.
    """

    schema: ClassVar[int] = 2
    device: str
    plan: Plan
    forecast: Forecast
    memory_bytes: int
    is_here: bool = True
    untried: Forecast | None = None
    price: Price | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A plan that was not chosen, and why; if none fits on a device, the plan that needs the least."""

    schema: ClassVar[int] = 2
    device: str
    plan: Plan
    reason: str


@dataclass(frozen=True, kw_only=True)
class Share:
    """A part of a whole, in the whole's unit: `what` is its kind, `where` the user's line."""

    what: str
    value: float
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Parts of the chosen plan's peak [bytes] and of one of its updates [s], largest first."""

    schema: ClassVar[int] = 1
    peak_bytes: tuple[Share, ...]
    peak_at: str
    step_s: tuple[Share, ...]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The planner's answer: the chosen plan first, why, and what was rejected.

    `candidates` has one plan for each device, or for each layout over several, best first. `advice` is one sentence for
    a user who asks which device to take. `others_share` is what other processes used of the CPU in trials [0 to 1],
    where that was enough to matter: plans were then tried with the threads that they left free. `is_settled` is False
    where a run begins under the plan and tries others on its own updates. `memory_limit_bytes` is what its user allowed
    (None: all that the device has), there or where the run goes on.
    """

    schema: ClassVar[int] = 2
    device: str
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    explanation: tuple[str, ...]
    took_s: float
    advice: str = ""
    breakdown: Breakdown | None = None
    others_share: float = 0.0
    is_settled: bool = True
    memory_limit_bytes: float | None = None

    @property
    def chosen(self) -> Candidate:
        """The plan to run."""
        return self.candidates[0]


@dataclass(frozen=True, kw_only=True)
class KeptDecision:
    """A decision for a device that was here, when it was made (ISO 8601), and the coupling of the job's samples."""

    schema: ClassVar[int] = 2
    decision: Decision
    coupling: Coupling
    at: str


_MALLOC_BY_BYTES: tuple[Malloc, ...] = ("mapped", "default", "retained")
"""In the order of the system memory that they hold, least first."""
_STATES_BY_BYTES: tuple[OptimizerStates, ...] = ("8bit", "bf16", "full")
_OFFLOAD_BY_BYTES: tuple[OptimizerOffload, ...] = ("gradients", "state", "none")


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A plan that ran out of memory while it trained.

    `job` identifies what its memory depends on: model, batch, loss, optimiser, the form of a sample. `forecast_bytes`
    is what the plan was expected to need, `reachable_bytes` what the process held or could have got when it failed;
    None where unknown.
    """

    schema: ClassVar[int] = 1
    device_model: str
    torch_version: str
    job: str
    plan: Plan
    run: str
    at: str
    forecast_bytes: float | None = None
    reachable_bytes: int | None = None

    def rules_out(self, plan: Plan) -> bool:
        """True if `plan` of the same job needs at least as much memory: as many samples, saving no more."""
        saves_no_more = (
            plan.checkpointed_blocks <= self.plan.checkpointed_blocks
            and (plan.checkpointing == "selective" or self.plan.checkpointing == "full" or not plan.checkpointed_blocks)
            and plan.activation_offload <= self.plan.activation_offload
            and plan.loss_chunks <= self.plan.loss_chunks
            and _MALLOC_BY_BYTES.index(plan.malloc) >= _MALLOC_BY_BYTES.index(self.plan.malloc)
            and _STATES_BY_BYTES.index(plan.optimizer_states) >= _STATES_BY_BYTES.index(self.plan.optimizer_states)
            and _OFFLOAD_BY_BYTES.index(plan.optimizer_offload) >= _OFFLOAD_BY_BYTES.index(self.plan.optimizer_offload)
        )
        same_precision = plan.precision == self.plan.precision or plan.precision in ("fp32", "tf32")
        return plan.micro_batch >= self.plan.micro_batch and saves_no_more and same_precision
