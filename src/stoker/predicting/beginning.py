"""Writing a job down before its first row: how it is cut up, and where its bits can be expected again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

from stoker.devices import attached_cpu
from stoker.engines import Engine
from stoker.errors import BadJob
from stoker.predicting.filling import fill
from stoker.predicting.identity import cut
from stoker.predicting.inputs import most_rows
from stoker.predicting.measuring import Bounds, Cut, about_rows, choose_cut, head_of
from stoker.predicting.request import Request
from stoker.records import EngineName
from stoker.records.prediction import PredictionJob


def new_job(
    request: Request, engines: Sequence[Engine], threads: int, *, clock: Callable[[], float], now: datetime
) -> PredictionJob:
    """The job that a request begins; its sources are read once through, its first rows are measured.

    Raises:
        BadJob: there are no rows, or the sources cannot be read.
    """
    asked = request.asked
    chosen = _chosen(request, engines, clock)
    sources, parts = cut(request.sources, chosen.part_rows)
    if not parts:
        raise BadJob("There are no rows", remedy="Look into the files: they have a header or a footer alone.")
    return PredictionJob(
        model=asked.model,
        version=asked.version,
        model_digest=asked.model_digest,
        columns=asked.columns,
        keep=asked.keep,
        pixels=asked.pixels,
        allow_nan=asked.allow_nan,
        batch_rows=chosen.batch_rows,
        part_rows=chosen.part_rows,
        threads=threads,
        basis=chosen.basis,
        sources=sources,
        parts=parts,
        made_on=attached_cpu().model,
        made_at=now.isoformat(timespec="seconds"),
        libraries=_libraries(request.artifact.manifest.engine),
    )


def elsewhere(job: PredictionJob, engine: EngineName) -> str:
    """What is another here than where the job was begun; empty if the rest will have the same bits."""
    here = {"CPU": attached_cpu().model, **_libraries(engine)}
    before = {"CPU": job.made_on, **job.libraries}
    changed = [f"{what} {before.get(what, 'none')} then, {now} now" for what, now in here.items()
               if before.get(what) != now]  # fmt: skip
    return "; ".join(changed)


def _chosen(request: Request, engines: Sequence[Engine], clock: Callable[[], float]) -> Cut:
    """Rows of a batch and of a part: as asked, or by what the first rows of the first source take."""
    asked, source = request.asked, request.sources[0]
    part = head_of(source)
    reader = source.open([name for names in asked.columns.values() for name in names])
    try:
        rows = reader.read(part)
    finally:
        reader.close()
    filled = fill(rows, request.inputs, asked.columns, asked.pixels, allow_nan=asked.allow_nan)
    bounds = Bounds(
        most_rows=most_rows(request.artifact.manifest),
        num_rows=sum(map(about_rows, request.sources)),
        instances=len(engines),
    )
    return choose_cut(filled, part.num_rows, request.model(1), engines[0], clock, asked, bounds)


def _libraries(engine: EngineName) -> dict[str, str]:
    """Versions of what the bits of the answers, and of the files, depend on."""
    found = {}
    for name in ("stoker", "pyarrow", engine):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # ONNX Runtime has a package of another name for GPUs
            found[name] = "unknown"
    return found
