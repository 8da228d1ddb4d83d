"""`stoker tune`: which settings of a job are best; each trial a real run, the study continued by the same command."""

from __future__ import annotations

import inspect
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker import records
from stoker.devices import attached_devices, resolve_place
from stoker.devices.cpu import usable_cpus
from stoker.errors import BadJob, BadRun, nearest
from stoker.flow.studies import Study, StudyDirectory, find_study, write_page
from stoker.flow.trials import JobSource, LookAtJobs, Survey, TrainTrial
from stoker.flow.tune_options import PLANNED, TuneOptions, options_from
from stoker.jobs import Job
from stoker.records import Device
from stoker.records.codec import JSON
from stoker.records.study import (
    PlannedTrial,
    StudyEvent,
    StudyEventKind,
    StudyForecast,
    StudyResult,
    StudySettings,
)
from stoker.store import runs_root
from stoker.tuning.library import require_optuna
from stoker.tuning.messages import Slot
from stoker.tuning.packing import Packing, by_cores, packed
from stoker.tuning.space import Space, as_text, examples, grid, in_words, parse_space

if TYPE_CHECKING:
    from stoker.tuning.conducting import Work

Sink = Callable[[StudyEvent], None]

_INTERVALS = 5
"""Of a population; runs seldom have fewer evaluations, and each interval begins with a start of a process."""


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
        RunFailed: three trials in a row failed alike; what is done is kept.
    """
    asked, began = options_from(options), time.monotonic()
    if dry_run and not asked.planned:
        raise BadJob("--dry-run stops at the forecast, and --planned 0 leaves that out", remedy="Drop one of them.")
    require_optuna(asked.sampler)
    wanted, source = parse_space(space), _source(job, fixed or {})
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
    packing = packed(_devices(device, asked.on), sorted(usable_cpus()), _peak(planned), asked.parallel)
    forecast = _forecast(settings, planned, asked, device, packing) if is_new else kept
    if forecast is not None and is_new:
        sink(_event("forecast", **records.to_json(forecast)))
    if dry_run:
        return Study(directory, StudyResult(settings=settings, trials=(), forecast=forecast))
    sink(_event("packed", slots=len(packing.slots), why=packing.why))
    if asked.sampler == "gp" and asked.rule != "none":
        from stoker.tuning.sampling import startup_trials  # noqa: PLC0415 - Optuna

        learns = f"the Gaussian process learns from finished trials only: until {startup_trials(wanted)} are finished"
        sink(_event("warned", message=f"{learns}, it proposes at random; --pruner none lets all finish"))
    with ExitStack() as stack:
        stack.enter_context(directory.locked())
        directory.begin(settings, forecast)
        return _conducted(directory, settings, asked, source, packing, sink, began)


def _conducted(
    directory: StudyDirectory, settings: StudySettings, asked: TuneOptions, source: JobSource, packing: Packing,
    sink: Sink, began: float,
) -> Study:  # fmt: skip
    """Run what is left of the study, and write its page, whatever it ended by; its time runs since `began`."""
    from stoker.tuning.conducting import Conductor  # noqa: PLC0415 - Optuna
    from stoker.tuning.processes import Processes, run_here  # noqa: PLC0415 - beside it

    storage, study = directory.opened(settings)
    work = _work(directory, asked, len(packing.slots), began)
    conductor = Conductor(storage, study, settings, work, sink)
    run_trial = TrainTrial(source=source, plan=asked.plan)
    try:
        if asked.in_processes:
            Processes(run_trial, packing.slots).run(conductor)
        else:
            run_here(conductor, run_trial, Slot(on=asked.on))
    finally:
        result = directory.read_result()
        if (unwritten := write_page(directory, result)) is not None:
            sink(_event("warned", message=unwritten))
    if conductor.problem is not None:
        raise conductor.problem
    if conductor.seconds_left == 0.0:
        ended = sum(one.state != "running" for one in result.trials)
        words = f"the time is up: {ended} of {_all_trials(settings, asked)} trials have ended; the same command goes on"
        sink(_event("warned", message=words))
    best = None if result.best is None else {"trial": result.best.number, "value": result.best.value}
    sink(_event("done", study=directory.name, path=str(directory.path), best=best, trials=len(result.trials),
                samples=result.samples, page=str(directory.page_path)))  # fmt: skip
    return Study(directory, result)


def _source(job: str | Path | Callable[..., Job], fixed: Mapping[str, Any]) -> JobSource:
    if isinstance(job, str | Path):
        return JobSource(path=Path(job).resolve(), fixed=dict(fixed))
    if not callable(job):
        raise BadJob(f"wanted a job file, or a function of the settings that returns a Job, got {job!r}")
    return JobSource(function=job, fixed=dict(fixed))


def _require_free(space: Space, source: JobSource) -> None:
    """Refuse a setting that is both fixed and searched, and one that the function does not take."""
    for parameter in space:
        if parameter.name in source.fixed:
            raise BadJob(f"{parameter.name!r} is set and searched at once", remedy="Drop one of --set and --space.")
    if source.function is None:
        return  # a job file tells when it is loaded
    parameters = inspect.signature(source.function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for name in (*(one.name for one in space), *source.fixed):
        if name not in parameters:
            raise BadJob(f"{source.name}() has no setting {name!r}. {nearest(name, parameters)}")


def _name(source: JobSource, space: Space, asked: TuneOptions) -> str:
    """A name that the same request always has; changes of the job file itself are seen later, and refused."""
    what = [
        source.name, {name: as_text(value) for name, value in source.fixed.items()}, list(map(in_words, space)),
        asked.sampler, asked.rule, asked.objective, asked.seed, asked.on,
        *((asked.trials, asked.intervals) if asked.sampler == "pbt" else ()),
    ]  # fmt: skip
    return f"tune-{source.name}-{records.digest(what)[:6]}"


def _surveyed(
    source: JobSource, space: Space, asked: TuneOptions, device: Device, cores: int, *, plans: bool
) -> Survey:
    """The jobs looked at in a process with a trial's share of the CPUs; planned too if asked for."""
    from stoker.tuning.processes import in_a_process  # noqa: PLC0415 - multiprocessing, for those who tune

    count = asked.planned if plans else 0
    configurations = examples(space, max(PLANNED, count), asked.seed)[: count or None]
    look = LookAtJobs(source=source, on=asked.on, plan=asked.plan, is_planned=count > 0, seed=asked.seed,
                      population=space if asked.sampler == "pbt" else ())  # fmt: skip
    if not asked.in_processes:
        return look(configurations)
    slot = packed((device,), sorted(usable_cpus()), None, cores).slots[0] if device.kind == "cpu" else Slot(on=asked.on)
    return in_a_process(look, (configurations,), slot)  # type: ignore[no-any-return]


def _settings(
    directory: StudyDirectory, survey: Survey, space: Space, asked: TuneOptions, source: JobSource
) -> StudySettings:
    """What the study is; one that exists keeps what it began with.

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
        raise BadJob(f"--objective {objective}: the job measures no such thing. "
                     f"{nearest(objective, survey.objectives)}")  # fmt: skip
    if directory.is_study:
        kept = directory.read_settings()
        if kept.job_digest not in (survey.digest, survey.text_digest):
            raise _changed("job", directory)
        if kept.data_fingerprint and kept.data_fingerprint != survey.data_fingerprint:
            raise _changed("data", directory)
        return kept
    return StudySettings(
        name=directory.name, job=str(source.path or source.name), job_digest=survey.digest,
        fixed={name: as_text(value) for name, value in source.fixed.items()}, space=space, objective=objective,
        higher_is_better=survey.objectives[objective], sampler=asked.sampler, pruner=asked.rule, seed=asked.seed,
        on=asked.on, first_samples=survey.first_samples, total_samples=survey.total_samples, storage=asked.storage,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"), intervals=_intervals(asked, survey),
        members=asked.trials if asked.sampler == "pbt" else 0, data_fingerprint=survey.data_fingerprint,
    )  # fmt: skip


def _changed(what: str, directory: StudyDirectory) -> BadRun:
    have = "have" if what == "data" else "has"
    return BadRun(
        f"The {what} of {directory.name} {have} changed since the study began: its trials would not compare.",
        remedy="Begin another one with --study NAME.",
    )


def _intervals(asked: TuneOptions, survey: Survey) -> int:
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
            remedy="Evaluate more often: Job(evaluate_every=…).",
        )
    return asked.intervals or min(_INTERVALS, evaluations)


def _all_trials(settings: StudySettings, asked: TuneOptions) -> int:
    """How many trials a study comes to."""
    if settings.sampler == "pbt":
        return settings.members * settings.intervals
    return min(asked.trials, len(grid(settings.space, settings.seed))) if settings.sampler == "grid" else asked.trials


def _require_same_request(kept: StudySettings, space: Space, asked: TuneOptions, source: JobSource) -> None:
    """Refuse to go on with a study under another space or rule; only how much, and how many at once, may differ."""
    fixed = {name: as_text(value) for name, value in source.fixed.items()}
    pairs: list[tuple[str, object, object]] = [
        ("space", " ".join(map(in_words, kept.space)), " ".join(map(in_words, space))),
        ("settings", kept.fixed, fixed), ("sampler", kept.sampler, asked.sampler),
        ("pruner", kept.pruner, asked.rule), ("seed", kept.seed, asked.seed), ("place", kept.on, asked.on),
        ("storage", kept.storage, asked.storage),
    ]  # fmt: skip
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


def _forecast(
    settings: StudySettings, planned: Sequence[PlannedTrial], asked: TuneOptions, device: Device, packing: Packing
) -> StudyForecast | None:
    """What the study will take; None where nothing was planned."""
    if not asked.planned:
        return None
    from stoker.tuning.costs import forecast_study  # noqa: PLC0415 - Optuna
    from stoker.tuning.pruning import rungs_of  # noqa: PLC0415 - likewise

    return forecast_study(
        planned, trials=settings.members or _all_trials(settings, asked), parallel=len(packing.slots),
        pruner=asked.rule, intervals=settings.intervals,
        rungs=rungs_of(settings.first_samples, settings.total_samples),
        gpus=None if device.kind == "cpu" else len({slot.on for slot in packing.slots}),
    )  # fmt: skip


def _peak(planned: Sequence[PlannedTrial]) -> float | None:
    """The most that one trial is forecast to need [bytes]."""
    peaks = [one.peak_bytes.high for one in planned if one.peak_bytes is not None]
    return max(peaks, default=None)


def _devices(device: Device, on: str) -> tuple[Device, ...]:
    """Where trials may run: `here` is every GPU of the kind, a name is that one."""
    if device.kind == "cpu" or on.strip().lower() not in ("here", "cuda"):
        return (device,)
    return tuple(one for one in attached_devices() if (one.kind, one.model) == (device.kind, device.model))


def _work(directory: StudyDirectory, asked: TuneOptions, parallel: int, began: float) -> Work:
    from stoker.tuning.conducting import Work  # noqa: PLC0415 - Optuna

    left_s = None if asked.seconds is None else max(0.0, asked.seconds - (time.monotonic() - began))
    return Work(
        directory=directory.path.resolve(), worker=f"{platform.node()}:{directory.path.resolve()}",
        trials=asked.trials, parallel=parallel, seconds=left_s,
    )  # fmt: skip


def _event(kind: StudyEventKind, **fields: JSON) -> StudyEvent:
    return StudyEvent(
        kind=kind,
        at=time.time(),
        fields={name: value for name, value in fields.items() if name not in ("record", "schema")},
    )


def study(where: str | Path) -> Study:
    """The study of that name, or in that directory, as it stands; another process may work on it meanwhile.

    Raises:
        BadRun: there is none, or it is damaged.
    """
    require_optuna()
    directory = find_study(runs_root(), str(where))
    return Study(directory, directory.read_result())
