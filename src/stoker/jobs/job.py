"""Job: what is learned. Everything that changes the mathematics is here, and nothing that does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard

from stoker.errors import BadJob, BadSetting, nearest
from stoker.jobs.averages import EMA, SWA
from stoker.jobs.batch_size import AutoBatch, TokenBatch, token_checks
from stoker.jobs.early_stopping import EarlyStopping, Stop, Target, bare_name, stop_rules
from stoker.jobs.evaluation_settings import Evaluation
from stoker.jobs.fields import Fields
from stoker.jobs.freezing import Freeze, Patterns, freezing_of
from stoker.jobs.initial_weights import Weights, WeightsSource, as_weights
from stoker.jobs.lengths import Arrangement, length_checks
from stoker.jobs.metrics import Named, direction_of, is_stateful, listed, metric_name
from stoker.jobs.numeric_settings import is_count, is_number, is_whole, plain_number
from stoker.jobs.objective import Objective, objective_checks
from stoker.jobs.optimizers import SGD, Adam, AdamW, Muon, Optimizer, ScheduleFree
from stoker.jobs.regularization import Mix, mix_checks
from stoker.jobs.sampling import InOrder, Sampling
from stoker.jobs.schedules import OPEN_SCHEDULE, Constant, Plateau, Schedule, Warmup, bound
from stoker.jobs.sync import Sync
from stoker.units import Duration

if TYPE_CHECKING:
    import torch


LOSSES = ("cross_entropy", "token_cross_entropy", "binary_cross_entropy", "mse", "l1", "own")
RECIPES = ("fast",)
NUMERICS = ("fp16", "fp8", "bf16-states", "8bit-states")
METRICS = ("accuracy", "top5_accuracy", "token_accuracy", "binary_accuracy", "mse", "l1")

_NUMBERS = ("batch", "clip_norm", "average", "coupling_group", "seed")
"""Fields that are stored as Python's numbers."""


@dataclass(frozen=True)
class Loss:
    """A loss as a sum over what it counts (samples, or valid tokens) and that count; both may be tensors.

    The update divides once, by the count of the whole optimiser batch.

    Args:
        sum: the loss summed over the batch, a scalar tensor with its graph.
        count: what `sum` is a sum over [samples, or valid tokens].
    """

    sum: torch.Tensor
    count: torch.Tensor | float


@dataclass(frozen=True)
class Holdout:
    """A share of the training data set aside for validation; the same samples for the same `seed`.

    Args:
        fraction: share of the training data to set aside, between 0 and 1.
        seed: of the permutation of indices that draws it.
        stratify: take that share of each class, as nearly as whole samples allow.

    Raises:
        BadSetting: `fraction` is out of its range.
    """

    fraction: float
    _: KW_ONLY
    seed: int = 0
    stratify: bool = False

    def __post_init__(self) -> None:
        if not (is_number(self.fraction) and 0 < self.fraction < 1):
            expected = "the share of the data to set aside, between 0 and 1"
            raise BadSetting(f"holdout takes {expected}, got {self.fraction!r}")


holdout = Holdout


class OpenAugmentation(tuple[Callable[..., Any], ...]):
    """No transforms, of a Job that states none: a recipe may set some."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What is learned: a model, its data, and everything else that changes the mathematics.

    Args:
        model: a module, or a function of no arguments that makes one (called with its random draws fixed by `seed`).
        data: training samples: a tuple or dict of tensors or NumPy arrays (first dimension: samples), a map-style
            PyTorch dataset, or one of `stoker.data`.
        loss: a name (see `LOSSES`; "own" is the mean loss that the model itself returns); `loss(output, target)`
            giving one value per sample; `loss(model, batch)`, recognised by its first parameter's name, giving
            `stoker.Loss(sum, count)`; or a scalar mean, accepted after a probe. With `step` it is for evaluation only.
            `stoker.Objective(loss, …)` adds label smoothing or a penalty, or declares a loss over the whole batch.
        optimizer: `stoker.SGD`, `Adam`, `AdamW`, `Muon`, one of `stoker.optimizers`, or a function from parameters to
            a `torch.optim.Optimizer`; it may be left to the recipe.
            With `step`: a function from the model to one, or to a list or dict of them, passed to `step` as it is.
        step: `step(model, optimizers, batch)`, a whole update of the job's own, for more than one loss or one
            optimiser; it returns a scalar loss, or a dict of scalars, the loss first. See docs/custom-loop.md.
        batch: the optimiser batch [samples]: one update averages over it; `stoker.tokens(16_384)` for as many samples
            as have that many tokens; or `stoker.auto(base=64)`, to have it chosen by the gradient's noise and the
            learning rate, stated for the base, scaled with it ("auto" is short for that).
        until: how long to train: `stoker.epochs(5)`, `samples`, `updates`, or `seconds`.
        valid: data of the same form, or `stoker.holdout(0.1)`; chooses the best checkpoint. Or several such by name,
            `{"seen": stoker.holdout(0.1), "unseen": others}`: each is evaluated every time, and the first one chooses.
        test: data of the same form, used once, at the end.
        metrics: names (see `METRICS`), functions like the loss whose values are summed over samples and divided by
            their count, or objects that keep a state, such as torchmetrics'; a dict gives names. The first one chooses
            the best checkpoint if it is a name, or has an attribute for its direction; else the loss does.
        schedule: a function of progress (0 to 1) giving a factor of the learning rate; see `stoker.schedules`.
        augment: random transforms of the first input, in batches on the device; see `stoker.transforms`.
        mix: `stoker.transforms.Mixup(…)` or `CutMix(…)`: samples of a batch mixed with each other, and their losses; of
            several, one is drawn for each batch.
        clip_norm: the gradient's global norm is scaled down to this.
        average: an average of the weights, which is evaluated and kept in their place: `stoker.EMA(0.999)`, for which
            its decay is short; or `stoker.SWA(start=0.75)`, the mean at points of the last part of the run.
        stop: rules that end the run early: `[stoker.EarlyStopping(patience=stoker.epochs(5)),
            stoker.Target("accuracy", 0.95)]`, whichever comes first.
        freeze: patterns of frozen parameters, `("embeddings.*",)`, or with a duration for each,
            `{"encoder.*": stoker.epochs(2)}`; or `stoker.Freeze`, which also sets what batch norms there do.
        init: the weights that the model starts from: a safetensors file, a folder of them, tensors by name, or
            `stoker.Weights`, which also sets which tensors keep their own initial values.
        coupling_group: samples whose statistics belong together in a model that couples samples (default: the batch).
        sync: how replicas on slow links are synchronised after an interval, instead of with every update:
            `stoker.DiLoCo(every=…)` or `stoker.LocalSGD(every=…)`. See docs/slow-links.md.
        fields: what of a sample goes into the model, what is the target, and how samples become a batch:
            `stoker.Fields(inputs=["ids", "mask"], target="label", collate=stoker.lengths.padded())`.
        sampling: which samples an epoch has: `stoker.sampling.balanced()`, `weighted(…)`, `stratified()` or
            `in_order()` (default: every one once, in a keyed order); or how samples of different lengths form batches:
            `stoker.lengths.bucketed()` or `packed(…)`. See docs/sampling.md.
        evaluation: how often `valid` is evaluated, and which of the evaluated weights the run keeps:
            `stoker.Evaluation(every=stoker.epochs(2), select="last")` (default: every epoch, the best).
        on_non_finite: reaction to a loss or gradient that is not finite: "stop"; "roll_back" to the last checkpoint
            and continue in fp32; or "skip", which leaves the update out and so changes what is learned.
        numerics: what plans may round more than the contract allows: `"fp16"`, passes in fp16 with a dynamic loss
            scale on devices without bf16; `"fp8"`, products of linear layers in fp8 on devices that have it, where
            that is faster; `"bf16-states"` and `"8bit-states"`, moments of Adam and AdamW kept in fewer bits where
            memory is short. See docs/contract.md.
        recipe: "fast" sets whatever is left open here of the optimiser, schedule, augmentation and label smoothing, for
            image classifiers that should be good after few epochs; see `stoker.recipes`.
        seed: fixes the initial weights, the order, the augmentation and the model's own random draws.
        name: name of this job's runs.

    Raises:
        BadJob: there is no such field, or a setting is of the wrong type or out of range.
    """

    model: torch.nn.Module | Callable[[], torch.nn.Module]
    data: Any
    loss: str | Callable[..., Any] | Objective | None = None
    optimizer: Optimizer | Callable[[Any], Any] | None = None
    batch: int | TokenBatch | AutoBatch
    until: Duration
    step: Callable[..., Any] | None = None
    valid: Any = None
    test: Any = None
    metrics: Sequence[str | Callable[..., Any]] | Any = ()
    schedule: Schedule = OPEN_SCHEDULE
    augment: Sequence[Callable[..., Any]] = OpenAugmentation()
    mix: Mix | Sequence[Mix] | None = None
    clip_norm: float | None = None
    average: EMA | SWA | float | None = None
    stop: Sequence[Stop] = ()
    freeze: Freeze | Patterns | None = None
    init: Weights | WeightsSource | None = None
    coupling_group: int | None = None
    sync: Sync | None = None
    fields: Fields = Fields()
    sampling: Sampling | Arrangement | None = None
    evaluation: Evaluation = Evaluation()
    on_non_finite: Literal["stop", "roll_back", "skip"] = "stop"
    numerics: Sequence[str] = ()
    recipe: Literal["fast"] | None = None
    seed: int = 0
    name: str | None = None

    def __new__(cls, **given: Any) -> Self:
        """Refuse settings that do not exist, before `__init__` would raise a TypeError without a remedy."""
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise BadJob(f"Job({name}=…): there is no such field. {nearest(name, cls.__dataclass_fields__)}")
        return super().__new__(cls)

    @property
    def objective(self) -> Objective:
        """The loss with its settings, also where `loss` is only a name or a function."""
        return self.loss if isinstance(self.loss, Objective) else Objective(self.loss)

    @property
    def batch_size(self) -> int:
        """Samples of an update of a resolved job [samples]; of a batch in tokens the largest number of any update.

        Raises:
            TypeError: the job is not resolved, and the number is not known yet.
        """
        size = self.batch.num_samples if isinstance(self.batch, TokenBatch) else self.batch
        if not isinstance(size, int):
            raise TypeError(f"the number of samples of batch={self.batch!r} is known of a resolved job only")
        return size

    @property
    def validation(self) -> dict[str, Any]:
        """Validation data by split: `valid`, or `valid/NAME` for each of several sets; the first one chooses."""
        if self.valid is None:
            return {}
        if not _are_sets(self.valid):
            return {"valid": self.valid}
        return {f"valid/{name}": data for name, data in self.valid.items()}

    def __post_init__(self) -> None:
        for name, group in (("fields", Fields), ("evaluation", Evaluation)):
            if not isinstance(value := getattr(self, name), group):
                raise BadJob(f"Job({name}=…): wanted stoker.{group.__name__}(…), got {value!r}")
        for name in _NUMBERS:
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        given: object = self.batch
        if isinstance(given, str) and given == "auto":
            object.__setattr__(self, "batch", AutoBatch())
        if is_number(self.average):
            self._convert("average", lambda decay: EMA(float(decay)))
        if self.freeze is not None:
            self._convert("freeze", freezing_of)
        if self.init is not None:
            self._convert("init", as_weights)
        self._convert("metrics", listed)
        self._convert("stop", stop_rules)
        if isinstance(self.until, Duration):
            self._convert("schedule", lambda schedule: bound(schedule, self.until))
        checks = (
            *length_checks(self),
            *_parts(self),
            *_amounts(self),
            *_choices(self),
            *_own_step(self),
            *_low_bit_states(self),
            *_sync(self),
            *_thawing(self),
            *_validation(self),
            *_selection(self),
            *_training_control(self),
            *token_checks(self),
            *mix_checks(self),
            *objective_checks(self),
        )
        for field_name, is_right, problem in checks:
            if not is_right:
                raise BadJob(f"Job({field_name}=…): {problem}")

    def _convert(self, name: str, convert: Callable[[Any], Any]) -> None:
        """Bring a field into its full form."""
        try:
            object.__setattr__(self, name, convert(getattr(self, name)))
        except BadSetting as problem:
            raise BadJob(f"Job({name}=…): {problem.message}", remedy=problem.remedy) from None
        except (TypeError, ValueError) as problem:
            raise BadJob(f"Job({name}=…): {problem}") from None


_Check = tuple[str, bool, str]
"""A field, whether its setting is valid, and the problem if not."""


def _parts(job: Job) -> Iterator[_Check]:
    """Modules and functions."""
    yield "model", callable(job.model), f"wanted a module or a function that makes one, got {_kind(job.model)}"
    optimizers = "stoker.SGD, Adam, AdamW, Muon or a function from parameters to an optimiser"
    is_made = hasattr(job.optimizer, "param_groups")
    made = " that is made already; what is trained is a copy of the model" if is_made else ""
    is_left_open = job.optimizer is None and job.recipe is not None
    is_optimizer = isinstance(job.optimizer, Optimizer) or callable(job.optimizer) or is_left_open
    yield "optimizer", is_optimizer, f"wanted {optimizers}, got {_kind(job.optimizer)}{made}"
    loss = job.objective.loss
    is_loss = callable(loss) or loss in LOSSES or (loss is None and job.step is not None)
    yield "loss", is_loss, f"{loss!r} is no loss. {nearest(str(loss), LOSSES)}"
    schedule: object = job.schedule
    kind = f"the class {schedule.__name__}" if isinstance(schedule, type) else _kind(schedule)
    is_function = callable(schedule) and not isinstance(schedule, type)
    yield "schedule", is_function, f"wanted a function of progress, got {kind}"
    augment = ", ".join(map(repr, job.augment)) if _is_list(job.augment) else repr(job.augment)
    are_transforms = _is_list(job.augment) and all(map(callable, job.augment))
    yield "augment", are_transforms, f"wanted a list of transforms, got {augment}"
    yield "test", not isinstance(job.test, Holdout), "test data must be separate; stoker.holdout(…) is for valid"
    yield from _metrics(job.metrics)


def _metrics(metrics: object) -> Iterator[_Check]:
    if not isinstance(metrics, list | tuple):
        yield "metrics", False, f"wanted a list of names and functions, got {metrics!r}"
        return
    for metric in metrics:
        inner = metric.metric if isinstance(metric, Named) else metric
        is_known = callable(inner) or is_stateful(inner) or (isinstance(inner, str) and inner in METRICS)
        yield "metrics", is_known, f"{inner!r} is no metric. {nearest(str(inner), METRICS)}"
    names = list(map(metric_name, metrics))
    for name in names:
        # Results are stored by name: of two metrics with one name, one would be lost.
        yield "metrics", names.count(name) == 1, f"{names.count(name)} metrics are called {name!r}; define each by name"
        yield "metrics", name != "loss", "a metric called 'loss' would stand in for the loss; give it another name"


def _amounts(job: Job) -> Iterator[_Check]:
    """Numbers and durations."""
    batch, loss, group = job.batch, job.objective.loss, job.coupling_group
    is_batch = isinstance(batch, TokenBatch | AutoBatch) or is_count(batch)
    yield "batch", is_batch, f"wanted a positive whole number of samples, got {batch!r}"
    yield "until", isinstance(job.until, Duration), f"wanted a duration such as stoker.epochs(5), got {job.until!r}"
    smooths_classes = job.objective.label_smoothing == 0 or loss in ("cross_entropy", "token_cross_entropy")
    yield "loss", smooths_classes, f"Objective(label_smoothing=…) goes with the cross-entropies, not with {loss!r}"
    is_norm = job.clip_norm is None or (is_number(job.clip_norm) and job.clip_norm > 0)
    yield "clip_norm", is_norm, f"wanted a positive norm, got {job.clip_norm!r}"
    is_average = job.average is None or isinstance(job.average, EMA | SWA)
    yield "average", is_average, f"wanted a decay, stoker.EMA(…) or stoker.SWA(…), got {job.average!r}"
    most = batch.base if isinstance(batch, AutoBatch) else batch
    is_within = isinstance(most, TokenBatch) or (is_count(most) and is_count(group) and group <= most)
    is_group = group is None or (is_count(group) and is_within)
    yield "coupling_group", is_group, f"wanted a number of samples up to the batch of {most}, got {group!r}"
    is_seed = is_whole(job.seed) and 0 <= job.seed < 2**63
    yield "seed", is_seed, f"wanted a whole number from 0 to 2^63 - 1, got {job.seed!r}"


def _choices(job: Job) -> Iterator[_Check]:
    """Words."""
    is_reaction = job.on_non_finite in ("stop", "roll_back", "skip")
    yield "on_non_finite", is_reaction, f'wanted "stop", "roll_back" or "skip", got {job.on_non_finite!r}'
    are_numerics = _is_list(job.numerics) and all(numeric in NUMERICS for numeric in job.numerics)
    yield "numerics", are_numerics, f"wanted a list of {', '.join(map(repr, NUMERICS))}, got {job.numerics!r}"
    is_recipe = job.recipe is None or job.recipe in RECIPES
    yield "recipe", is_recipe, f"{job.recipe!r} is no recipe. {nearest(str(job.recipe), RECIPES)}"
    is_name = isinstance(job.name, str) and bool(job.name.strip())
    yield "name", job.name is None or is_name, f"wanted a name for its runs, got {job.name!r}"


def _own_step(job: Job) -> Iterator[_Check]:
    """A step of the job's own is atomic, and does everything between loss and update itself."""
    if job.step is None:
        return
    rounds = "a step of the job's own takes no loss scale, and keeps the states of its optimisers itself"
    yield "numerics", not job.numerics, rounds
    yield "step", callable(job.step), f"wanted a function of (model, optimizers, batch), got {_kind(job.step)}"
    skips = job.on_non_finite == "skip"
    yield "on_non_finite", not skips, "a step of the job's own has moved the weights before its loss is looked at"
    does_itself = "a step of the job's own does that itself"
    yield "loss", job.objective.penalty is None, f"Objective(penalty=…): {does_itself}"
    for name in ("clip_norm", "coupling_group", "recipe"):
        yield name, getattr(job, name) is None, does_itself
    first = job.metrics[0] if job.metrics else None
    can_choose = job.objective.loss is not None or isinstance(first, str) or hasattr(first, "lower_is_better")
    needed = (
        "to evaluate a job with a step of its own, give loss=…, or metrics of which the first is a name or has an "
        "attribute lower_is_better"
    )
    for name in ("valid", "test"):
        yield name, getattr(job, name) is None or can_choose, needed


def _low_bit_states(job: Job) -> Iterator[_Check]:
    """Moments of fewer bits are those of Adam and AdamW."""
    allowed = (
        [numeric for numeric in job.numerics if str(numeric).endswith("-states")] if _is_list(job.numerics) else []
    )
    if not allowed or job.optimizer is None:
        return
    has = f"{allowed[0]!r} is for stoker.AdamW and Adam"
    if not isinstance(job.optimizer, Adam | AdamW):
        yield "numerics", False, f"{has}, whose moments can be kept in fewer bits, not for {_kind(job.optimizer)}"
        return
    is_plain = not any(
        settings.get("amsgrad") for settings in (job.optimizer.settings(), *job.optimizer.groups.values())
    )
    yield "numerics", is_plain, f"{has} without amsgrad, whose largest second moment is kept whole"


def _sync(job: Job) -> Iterator[_Check]:
    """With sync each site makes updates of its own."""
    if job.sync is None:
        return
    given: object = job.sync
    yield "sync", isinstance(given, Sync), f"wanted stoker.DiLoCo(…) or stoker.LocalSGD(…), got {_kind(given)}"
    if isinstance(given, Sync) and isinstance(job.batch, int):
        given.early_interval(job.batch)
    why = "an average would be of one site's weights; sync has shared weights of its own"
    yield "average", job.average is None, why
    yield "step", job.step is None, "sync does not go with a step of the job's own"
    yield "numerics", "fp16" not in job.numerics, "sites with updates of their own would have loss scales of their own"
    yield "on_non_finite", job.on_non_finite == "stop", 'sync needs "stop": each site makes its own updates'
    is_scaled = isinstance(given, Sync) and given.rate == "by_noise" and isinstance(job.optimizer, SGD)
    yield "sync", not is_scaled, 'rate="by_noise" is for Adam and its kin; with SGD sites learn as fast without'


def _thawing(job: Job) -> Iterator[_Check]:
    """Parameters that thaw during training; those frozen for good go with everything."""
    if isinstance(job.freeze, Freeze) and job.freeze.is_gradual:
        why = "parameters that thaw while training goes on do not go with"
        yield "freeze", job.sync is None, f"{why} sync: freeze them for good, or not at all"
        yield "freeze", job.step is None, f"{why} a step of the job's own, which does that itself"
        yield "freeze", not isinstance(job.batch, AutoBatch), f"{why} a batch that is still to be chosen"
        yield "freeze", not isinstance(job.optimizer, Muon), f"{why} stoker.Muon"


def _are_sets(valid: object) -> bool:
    """Whether these are several sets by name; a dict of arrays, or of lists of numbers, is one set."""
    return type(valid) is dict and bool(valid) and not any(map(_is_column, valid.values()))


def _is_column(value: Any) -> bool:
    while isinstance(value, list | tuple) and len(value) and not hasattr(value, "dtype"):
        if isinstance(value, tuple) and any(hasattr(part, "dtype") for part in value):
            return False  # (inputs, targets)
        value = value[0]
    return is_number(value) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def _validation(job: Job) -> Iterator[_Check]:
    """Validation sets; names of several become part of the names of results."""
    is_cut = isinstance(job.sampling, InOrder) and any(isinstance(data, Holdout) for data in job.validation.values())
    yield "valid", not is_cut, "a holdout would leave gaps in the order that in_order() keeps; give data of its own"
    if not _are_sets(job.valid):
        return
    measures = [metric_name(metric) for metric in job.metrics] if _is_list(job.metrics) else []
    for name in job.valid:
        is_name = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) is not None
        yield "valid", is_name, f"a set is named by letters, digits, '-', '_' and '.', got {name!r}"
        clashes = [measure for measure in measures if measure.startswith(f"{name}/")]
        yield "valid", not clashes, f"the set {name!r} and the metric {clashes} would have results of one name"
    num_held_out = sum(isinstance(data, Holdout) for data in job.valid.values())
    yield "valid", num_held_out <= 1, f"{num_held_out} sets are held out of the training data, wanted one at most"
    absent = [name for name, data in job.valid.items() if data is None]
    yield "valid", not absent, f"the set {absent} is None"


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _training_control(job: Job) -> Iterator[_Check]:
    """Early stopping, averages, plateaus and schedule-free optimisers."""
    yield from _stops(job)
    if isinstance(job.optimizer, ScheduleFree):
        name = type(job.optimizer).__name__
        schedule: object = job.schedule.then if isinstance(job.schedule, Warmup) else job.schedule
        is_constant = isinstance(schedule, Constant)
        yield "schedule", is_constant, f"{name} goes without one: leave it out, or give schedules.warmup(…) alone"
        for other in ("average", "sync", "step"):
            yield other, getattr(job, other) is None, f"does not go with {name}, whose own average is what is kept"
    if (plateau := plateau_of(job)) is not None:
        yield from _measured("schedule", job, plateau.metric, lower_is_better=plateau.lower_is_better)


def _selection(job: Job) -> Iterator[_Check]:
    """The choice of the weights that a run keeps."""
    given: object = job.evaluation.select
    if given in ("best", "last"):
        return
    known = _measures(job)
    is_known = isinstance(given, str) and measure_of(job, given).partition("[")[0] in known
    expected = f'"best" or "last", or a measure ({", ".join(known)})'
    yield "evaluation", is_known, f"Evaluation(select=…): wanted {expected}, got {given!r}"
    if isinstance(given, str):
        yield from _measured("evaluation", job, given, lower_is_better=None)


def measure_of(job: Job, metric: str) -> str:
    """The measure in a setting, without split and set: `accuracy` of `valid/unseen/accuracy`."""
    name = bare_name(metric)
    first, _, rest = name.partition("/")
    return rest if rest and f"valid/{first}" in job.validation else name


def plateau_of(job: Job) -> Plateau | None:
    """The job's plateau schedule, also after a warm-up; None if it has none."""
    schedule: object = job.schedule
    while isinstance(schedule, Warmup):
        schedule = schedule.then
    return schedule if isinstance(schedule, Plateau) else None


def _stops(job: Job) -> Iterator[_Check]:
    for rule in job.stop:
        is_stop = isinstance(rule, EarlyStopping | Target)
        yield "stop", is_stop, f"wanted stoker.EarlyStopping(…) or stoker.Target(…), got a {type(rule).__name__}"
        if isinstance(rule, Target):
            is_right = rule.value <= 1 or not bare_name(rule.metric).endswith("accuracy")
            yield "stop", is_right, f"{rule.metric} is a share: Target({rule.metric!r}, 0.95), say"
        if is_stop:
            yield from _measured("stop", job, rule.metric, lower_is_better=rule.lower_is_better)


def _measures(job: Job) -> list[str]:
    """Names of the measures of an evaluation."""
    metrics = job.metrics if isinstance(job.metrics, list | tuple) else ()
    return [*(["loss"] if job.objective.loss is not None else []), *map(metric_name, metrics)]


def _measured(field: str, job: Job, metric: str, *, lower_is_better: bool | None) -> Iterator[_Check]:
    """A setting `field` that needs the measure `metric` on `valid`."""
    name = measure_of(job, metric)
    metrics = list(job.metrics) if isinstance(job.metrics, list | tuple) else []
    known = _measures(job)
    yield field, job.valid is not None, f"{metric!r} is measured on valid data, which the job does not have"
    is_known = name in known or name.partition("[")[0] in known
    sets = [split.removeprefix("valid/") for split in job.validation if split != "valid"]
    of_sets = f", each also with its set before it: {'/…, '.join(sets)}/…" if sets else ""
    yield field, is_known, f"{metric!r} is none of this job's measures: {', '.join(known)}{of_sets}"
    has_direction = direction_of(name, metrics, lower_is_better) is not None
    say = "give the metric an attribute lower_is_better" if field == "evaluation" else "lower_is_better=True or False"
    yield field, has_direction or not is_known, f"say of {metric!r} which way is better: {say}"
