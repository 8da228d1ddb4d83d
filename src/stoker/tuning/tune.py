"""`stoker tune`: which settings of a job are best; each trial a real run, the study continued by the same command."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from stoker import records, tuning
from stoker.devices import attached_devices, resolve_place
from stoker.devices.cpu import usable_cpus
from stoker.errors import BadJob, BadRun, nearest
from stoker.jobs import Job
from stoker.records import Device, Plan
from stoker.records.codec import JSON
from stoker.records.study import PrunerName, SamplerName, StudyEvent, StudyEventKind, StudyResult, StudySettings
from stoker.store import runs_root
from stoker.tuning.population import LEAST_MEMBERS
from stoker.tuning.processes import Processes, TrialPacking, TrialSlot, by_cores, in_a_process, packed, run_here
from stoker.tuning.space import Space, as_text, describe_space, examples, grid, parse_space, startup_trials
from stoker.tuning.study_directory import Study, StudyDirectory, find_study, write_page
from stoker.tuning.study_forecast import forecast_study, rungs_of
from stoker.tuning.trials import JobSource, JobSurvey, SurveyJobs, TrainTrial

PLANNED = 3
"""Configurations that are planned for the forecast: both ends of the space, and its middle."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How a study searches.

    Args:
        trials: configurations in all, those that are pruned or fail included; of a grid, at most its points; of a
            population, its members.
        sampler: what proposes them: `grid`, `random`, `tpe`, `gp`; or `pbt`, a population whose settings change while
            it trains.
        pruner: what gives them up early: `none`, `asha`, `hyperband` or `median`; None for ASHA, except under `pbt` and
            `gp`, which give up none.
        intervals: of a population: after so many parts of a run each do the worst go on from the best; None for five,
            or as many as a run has evaluations.
        objective: what is best: a metric on held-out data, such as `valid/accuracy` (default: what chooses a run's
            best checkpoint).
        parallel: trials at once, at most; None for as many as cores and memory allow.
        seconds: the longest this call may take [s]; what is under way then is saved and goes on the next time.
        seed: of what is proposed.
        storage: URL of a database that several machines share; empty for a file in the study's directory.
        study: its name (default: after the job and the options).
        on: the device, as for `stoker.train`.
        plan: a plan for every trial, instead of the planner's choice for each.
        planned: configurations that are planned beforehand, for the forecast; 0 for none.
        in_processes: each trial in a process of its own; False for this process, one after another.
    """

    trials: int = 20
    sampler: SamplerName = "tpe"
    pruner: PrunerName | None = None
    intervals: int | None = None
    objective: str | None = None
    parallel: int | None = 1
    seconds: float | None = None
    seed: int = 0
    storage: str = ""
    study: str | None = None
    on: str = "here"
    plan: Plan | Path | None = None
    planned: int = PLANNED
    in_processes: bool = True

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise BadJob(f"--trials {self.trials}: wanted a number from 1 on")
        for option, value, known in (("sampler", self.sampler, SamplerName), ("pruner", self.rule, PrunerName)):
            names = get_args(known)
            if value not in names:
                raise BadJob(f"--{option} {value}: there is no such {option}. {nearest(value, names)}")
        self._require_population()
        if self.seconds is not None and not self.seconds > 0:
            raise BadJob(f"--time: wanted a time above 0, got {self.seconds:g} s")
        if not self.in_processes and self.parallel != 1:
            raise BadJob(f"parallel={self.parallel} needs processes", remedy="Drop in_processes=False.")
        if (self.objective or "").startswith("test/"):
            raise BadJob(
                f"--objective {self.objective}: what is chosen by the test data is not tested by it any more",
                remedy="Choose by valid/…; the test data is for the one model that comes of it.",
            )

    @property
    def rule(self) -> PrunerName:
        """The rule that stops trials early."""
        return self.pruner or ("none" if self.sampler in ("pbt", "gp") else "asha")

    def _require_population(self) -> None:
        """Refuse options that do not go with a population, or only with one.

        Raises:
            BadJob: which.
        """
        if self.sampler != "pbt":
            if self.intervals is not None:
                raise BadJob(f"--intervals {self.intervals} is for a population", remedy="Add --sampler pbt.")
            return
        if self.trials < LEAST_MEMBERS:
            raise BadJob(
                f"--sampler pbt --trials {self.trials}: of a population, that is its members, and the worst "
                f"quarter is replaced: wanted {LEAST_MEMBERS} at least"
            )
        if self.intervals is not None and self.intervals < 2:
            raise BadJob(f"--intervals {self.intervals}: wanted 2 at least", remedy="Leave it out for 5.")
        if self.rule != "none":
            raise BadJob(
                f"--pruner {self.rule}: a population replaces its worst members itself", remedy="Leave --pruner out."
            )
        if self.storage:
            raise BadJob(
                "--storage: the members of a population take over each other's checkpoints, on one machine",
                remedy="Leave --storage out.",
            )


def options_from(given: Mapping[str, Any]) -> TuneOptions:
    """The options of these names.

    Raises:
        BadJob: there is no such option, or it cannot have that value.
    """
    known = [option.name for option in dataclasses.fields(TuneOptions)]
    for name in given:
        if name not in known:
            raise BadJob(f"stoker.tune has no option {name!r}. {nearest(name, known)}")
    return TuneOptions(**given)


Sink = Callable[[StudyEvent], None]

_INTERVALS = 5
"""Intervals of a population; runs seldom have fewer evaluations, and each interval starts a process."""


def tune(
    job: str | Path | Callable[..., Job],
    space: str | Path | Mapping[str, object] | Sequence[str],
    *,
    fixed: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    sink: Sink = lambda _: None,
    **options: Any,
) -> Study:
    """Try settings of a job and find the best; the same call continues a study that was cut off.

    Args:
        job: a job file, or a function of the settings that returns a Job (in processes: one that can be imported).
        space: what is tried: `"lr=log(1e-4,1e-1) width=choice(16,32)"`, a JSON or TOML file, or a mapping of names to
            such texts or lists.
        fixed: settings that all trials have.
        dry_run: stop at the forecast; nothing is written.
        sink: receives every event.
        options: see `TuneOptions`.

    Returns:
        The study; without trials if it was a dry run.

    Raises:
        BadJob: the space, the options or the job cannot be used.
        BadRun: the study is of another job or space, is in use, or its storage cannot be used.
        RunFailed: three trials in a row failed with the same error; what is done is kept.
    """
    asked, began = options_from(options), time.monotonic()
    if dry_run and not asked.planned:
        raise BadJob("--dry-run stops at the forecast, and --planned 0 leaves that out", remedy="Drop one of them.")
    require_optuna(asked.sampler)
    wanted = parse_space(space)
    if isinstance(job, str | Path):
        source = JobSource(path=Path(job).resolve(), fixed=dict(fixed or {}))
    elif callable(job):
        source = JobSource(function=job, fixed=dict(fixed or {}))
    else:
        raise BadJob(f"wanted a job file, or a function of the settings that returns a Job, got {job!r}")
    _require_free(wanted, source)
    directory = StudyDirectory(runs_root() / (asked.study or _name(source, wanted, asked)))
    device = resolve_place(asked.on, attached_devices())
    if directory.is_study:
        _require_same_request(directory.read_settings(), wanted, asked, source)
    sink(_event("looking", job=source.name))
    is_new = not directory.is_study
    cores = by_cores(device, sorted(usable_cpus()), asked.parallel)
    survey = _surveyed(source, wanted, asked, device, cores, plans=is_new)
    settings = _settings(directory, survey, wanted, asked, source)
    kept = None if is_new else directory.read_forecast()
    planned = survey.planned if kept is None else kept.planned
    devices: tuple[Device, ...] = (device,)
    if device.kind != "cpu" and asked.on.strip().lower() in ("here", "cuda"):  # every GPU of the kind
        devices = tuple(one for one in attached_devices() if (one.kind, one.model) == (device.kind, device.model))
    peak_bytes = max((trial.peak_bytes.high for trial in planned if trial.peak_bytes is not None), default=None)
    packing = packed(devices, sorted(usable_cpus()), peak_bytes, asked.parallel)
    forecast = kept
    if is_new and asked.planned:
        forecast = forecast_study(
            planned,
            trials=settings.members or _all_trials(settings, asked),
            parallel=len(packing.slots),
            pruner=asked.rule,
            intervals=settings.intervals,
            rungs=rungs_of(settings.first_samples, settings.total_samples),
            gpus=None if device.kind == "cpu" else len({slot.on for slot in packing.slots}),
        )
        sink(_event("forecast", **records.to_json(forecast)))
    if dry_run:
        return Study(directory, StudyResult(settings=settings, trials=(), forecast=forecast))
    sink(_event("packed", slots=len(packing.slots), why=packing.why))
    if asked.sampler == "gp" and asked.rule != "none":
        learns = f"the Gaussian process learns from finished trials only: until {startup_trials(wanted)} are finished"
        sink(_event("warned", message=f"{learns}, it proposes at random; --pruner none lets all finish"))
    with directory.locked():
        directory.begin(settings, forecast)
        return _conducted(directory, settings, asked, source, packing, sink, began)


def _conducted(
    directory: StudyDirectory,
    settings: StudySettings,
    asked: TuneOptions,
    source: JobSource,
    packing: TrialPacking,
    sink: Sink,
    began: float,
) -> Study:
    """Run what is left of the study, and write its page, whatever it ended by; its time runs since `began`."""
    storage, study = tuning.study_database.opened(directory, settings)
    left_s = None if asked.seconds is None else max(0.0, asked.seconds - (time.monotonic() - began))
    work = tuning.conductor.StudyWorker(
        directory=directory.path.resolve(),
        worker=f"{platform.node()}:{directory.path.resolve()}",
        trials=asked.trials,
        parallel=len(packing.slots),
        seconds=left_s,
    )
    conducting = tuning.conductor.Conductor(storage, study, settings, work, sink)
    run_trial = TrainTrial(source=source, plan=asked.plan)
    try:
        if asked.in_processes:
            Processes(run_trial, packing.slots).run(conducting)
        else:
            run_here(conducting, run_trial, TrialSlot(on=asked.on))
    finally:
        result = tuning.study_database.read_result(directory)
        if (unwritten := write_page(directory, result)) is not None:
            sink(_event("warned", message=unwritten))
    if conducting.problem is not None:
        raise conducting.problem
    if conducting.seconds_left == 0.0:
        ended = sum(trial.state != "running" for trial in result.trials)
        text = f"the time is up: {ended} of {_all_trials(settings, asked)} trials have ended; the same command goes on"
        sink(_event("warned", message=text))
    best = None if result.best is None else {"trial": result.best.number, "value": result.best.value}
    sink(
        _event(
            "done",
            study=directory.name,
            path=str(directory.path),
            best=best,
            trials=len(result.trials),
            samples=result.samples,
            page=str(directory.page_path),
        )
    )
    return Study(directory, result)


def require_optuna(sampler: str = "") -> None:
    """See that Optuna is installed, and what the sampler needs beyond it; quieten its own log.

    Raises:
        BadJob: it is not; the extra that brings it is named.
    """
    for name in ("optuna", *(("scipy", "torch") if sampler == "gp" else ())):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise BadJob(
                f"tuning needs {name}, which is not installed here", remedy="pip install 'stoker[tune]'"
            ) from error
    import optuna  # noqa: PLC0415 - known to be there only now

    optuna.logging.set_verbosity(optuna.logging.ERROR)


def _require_free(space: Space, source: JobSource) -> None:
    """Refuse a setting that is both fixed and searched, and one that the function does not take."""
    for parameter in space:
        if parameter.name in source.fixed:
            raise BadJob(f"{parameter.name!r} is set and searched at once", remedy="Drop one of --set and --space.")
    if source.function is None:
        return  # a job file is checked when it is loaded
    parameters = inspect.signature(source.function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in (*(parameter.name for parameter in space), *source.fixed):
        if name not in parameters:
            raise BadJob(f"{source.name}() has no setting {name!r}. {nearest(name, parameters)}")


def _name(source: JobSource, space: Space, asked: TuneOptions) -> str:
    """A name that the same request always has; changes of the job file itself are seen later, and refused."""
    what = [
        source.name,
        {name: as_text(value) for name, value in source.fixed.items()},
        list(map(describe_space, space)),
        asked.sampler,
        asked.rule,
        asked.objective,
        asked.seed,
        asked.on,
        *((asked.trials, asked.intervals) if asked.sampler == "pbt" else ()),
    ]
    return f"tune-{source.name}-{records.digest(what)[:6]}"


def _surveyed(
    source: JobSource, space: Space, asked: TuneOptions, device: Device, cores: int, *, plans: bool
) -> JobSurvey:
    """The jobs looked at in a process with a trial's share of the CPUs; planned too if asked for."""
    count = asked.planned if plans else 0
    configurations = examples(space, max(PLANNED, count), asked.seed)[: count or None]
    look = SurveyJobs(
        source=source,
        on=asked.on,
        plan=asked.plan,
        is_planned=count > 0,
        seed=asked.seed,
        population=space if asked.sampler == "pbt" else (),
    )
    if not asked.in_processes:
        return look(configurations)
    slot = (
        packed((device,), sorted(usable_cpus()), None, cores).slots[0]
        if device.kind == "cpu"
        else TrialSlot(on=asked.on)
    )
    return in_a_process(look, (configurations,), slot)  # type: ignore[no-any-return]


def _settings(
    directory: StudyDirectory, survey: JobSurvey, space: Space, asked: TuneOptions, source: JobSource
) -> StudySettings:
    """The settings of the study; one that exists keeps its own.

    Raises:
        BadJob: there is no such objective.
        BadRun: the job or its data have changed since the study began.
    """
    objective = asked.objective or survey.default
    objective = objective if objective.startswith("valid/") else f"valid/{objective}"
    if objective in survey.unclear:
        raise BadJob(
            f"--objective {objective}: is higher better?",
            remedy="Give the metric's function an attribute `lower_is_better`.",
        )
    if objective not in survey.objectives:
        raise BadJob(
            f"--objective {objective}: the job measures no such thing. {nearest(objective, survey.objectives)}"
        )
    if directory.is_study:
        kept = directory.read_settings()
        if kept.job_digest != survey.digest:
            raise _changed("job", directory)
        if kept.data_fingerprint != survey.data_fingerprint:
            raise _changed("data", directory)
        return kept
    return StudySettings(
        name=directory.name,
        job=str(source.path or source.name),
        job_digest=survey.digest,
        fixed={name: as_text(value) for name, value in source.fixed.items()},
        space=space,
        objective=objective,
        higher_is_better=survey.objectives[objective],
        sampler=asked.sampler,
        pruner=asked.rule,
        seed=asked.seed,
        on=asked.on,
        first_samples=survey.first_samples,
        total_samples=survey.total_samples,
        storage=asked.storage,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        intervals=_intervals(asked, survey),
        members=asked.trials if asked.sampler == "pbt" else 0,
        data_fingerprint=survey.data_fingerprint,
    )


def _changed(what: str, directory: StudyDirectory) -> BadRun:
    have = "have" if what == "data" else "has"
    return BadRun(
        f"The {what} of {directory.name} {have} changed since the study began: its trials would not compare.",
        remedy="Begin another one with --study NAME.",
    )


def _intervals(asked: TuneOptions, survey: JobSurvey) -> int:
    """In how many intervals a population is trained; 0 for other samplers.

    Raises:
        BadJob: a run has not so many evaluations.
    """
    if asked.sampler != "pbt":
        return 0
    evaluations = survey.total_samples // survey.first_samples
    if evaluations < (asked.intervals or 2):
        raise BadJob(
            f"--intervals {asked.intervals or 2}: each ends at an evaluation, and a run has {evaluations}",
            remedy="Evaluate more often: Job(evaluation=stoker.Evaluation(every=…)).",
        )
    return asked.intervals or min(_INTERVALS, evaluations)


def _all_trials(settings: StudySettings, asked: TuneOptions) -> int:
    """Number of trials a study comes to [trials]."""
    if settings.sampler == "pbt":
        return settings.members * settings.intervals
    return min(asked.trials, len(grid(settings.space, settings.seed))) if settings.sampler == "grid" else asked.trials


def _require_same_request(kept: StudySettings, space: Space, asked: TuneOptions, source: JobSource) -> None:
    """Refuse to go on with a study under another space or rule; only how much, and how many at once, may differ."""
    fixed = {name: as_text(value) for name, value in source.fixed.items()}
    pairs: list[tuple[str, object, object]] = [
        ("space", " ".join(map(describe_space, kept.space)), " ".join(map(describe_space, space))),
        ("settings", kept.fixed, fixed),
        ("sampler", kept.sampler, asked.sampler),
        ("pruner", kept.pruner, asked.rule),
        ("seed", kept.seed, asked.seed),
        ("place", kept.on, asked.on),
        ("storage", kept.storage, asked.storage),
    ]
    if kept.sampler == asked.sampler == "pbt":
        pairs.append(("members", kept.members, asked.trials))
        pairs.append(("intervals", kept.intervals, asked.intervals or kept.intervals))
    if asked.objective is not None:
        pairs.append(("objective", kept.objective.removeprefix("valid/"), asked.objective.removeprefix("valid/")))
    different = [f"{name}: {there} there, {here} here" for name, there, here in pairs if there != here]
    if different:
        raise BadRun(
            f"{kept.name} is another study; what differs:\n  " + "\n  ".join(different),
            remedy="Give the same options to continue it, or begin another one with --study NAME.",
        )


def _event(kind: StudyEventKind, **fields: JSON) -> StudyEvent:
    return StudyEvent(
        kind=kind,
        at=time.time(),
        fields={name: value for name, value in fields.items() if name not in ("record", "schema")},
    )


def study(where: str | Path) -> Study:
    """The study of that name, or in that directory, as it stands; another process may be working on it.

    Args:
        where: a study's name, the start of one, or its directory.

    Raises:
        BadRun: there is none, or it is damaged.
    """
    require_optuna()
    directory = find_study(runs_root(), str(where))
    return Study(directory, tuning.study_database.read_result(directory))
