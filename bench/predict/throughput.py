"""What reading ahead, and one thread an instance, are worth: rows/s of whole jobs, interleaved.

    python -m bench.predict.throughput MODEL ROWS [ROWS …] [--rounds 5] [--batch 32] [--part-rows 512]

Each file is predicted in several ways one after the other, round by round: one instance a core reading one part ahead
(what `stoker predict` does), without reading ahead, and one instance with all cores. Beside it the engine alone, in a
loop over one batch on as many threads at once as there are instances. Ratios are those of one round; the median of all
rounds and their range are printed and written to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from stoker.artifacts import read
from stoker.devices import attached_cpu
from stoker.engines import Engine, load
from stoker.predicting.batched_inference import stacked
from stoker.predicting.input_conversion import fill
from stoker.predicting.prediction_output import OutputDirectory
from stoker.predicting.prediction_request import PredictionRequest, PredictOptions, new_job, resolve_request
from stoker.predicting.prediction_run import PredictionRun

RESULTS = Path(__file__).parents[1] / "results"
OURS = "one thread an instance, reading ahead"
WAYS = {OURS: (1, 1), "not reading ahead": (1, 0), "one instance with all threads": (0, 1)}
"""Threads of an instance (0: all) and parts that are read ahead."""


def rows_per_s(asked: PredictionRequest, threads: int, ahead: int) -> float:
    """A whole job's rate, without loading the engine and choosing the batch."""
    cores = attached_cpu().cores
    engines = load(asked.artifact, instances=cores // threads if threads else 1, threads=threads or cores)
    try:
        job = new_job(asked, engines, threads or cores, clock=time.perf_counter, now=datetime.now(UTC))
        with tempfile.TemporaryDirectory() as name:
            out = OutputDirectory(Path(name))
            out.begin(job)
            running = PredictionRun(
                job=job,
                model=asked.model(job.batch_rows),
                sources=asked.sources,
                stamps=asked.stamps,
                schema=asked.schema,
                engines=engines,
                out=out,
                most_bad=asked.most_bad,
                sink=lambda _: None,
                ahead=ahead,
            )
            return running.run().rows_per_s
    finally:
        for engine in engines:
            engine.close()


def bare_rows_per_s(asked: PredictionRequest, batch_rows: int, seconds: float = 2.0) -> float:
    """The engine alone: the first rows as one batch, over and over, on every instance at once."""
    cores = attached_cpu().cores
    engines = load(asked.artifact, instances=cores, threads=1)
    source = asked.sources[0]
    reader = source.open([name for names in asked.asked.columns.values() for name in names])
    extent = source.extent(batch_rows)
    part = new_job(asked, engines, 1, clock=time.perf_counter, now=datetime.now(UTC)).parts[0]
    filled = fill(reader.read(part), asked.inputs, asked.asked.columns, asked.asked.pixels, allow_nan=False)
    reader.close()
    inputs = stacked(filled, range(min(batch_rows, extent.num_rows)), asked.model(batch_rows))

    def loop(engine: Engine) -> int:
        rows, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            engine.run(inputs)
            rows += batch_rows
        return rows

    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(loop, engines)) / seconds


def measure(asked: PredictionRequest, rounds: int, batch_rows: int) -> dict[str, object]:
    """Rates of all ways in all rounds, and their ratios to what `stoker predict` does."""
    rates: dict[str, list[float]] = {way: [] for way in (*WAYS, "the engine alone")}
    for _ in range(rounds):
        for way, (threads, ahead) in WAYS.items():
            rates[way].append(rows_per_s(asked, threads, ahead))
        rates["the engine alone"].append(bare_rows_per_s(asked, batch_rows))
    found: dict[str, object] = {}
    for way, each in rates.items():
        ratios = [ours / other for ours, other in zip(rates[OURS], each, strict=True)]
        median, low, high = statistics.median(ratios), min(ratios), max(ratios)
        found[way] = {"rows_per_s": each, "ours_to_it": {"median": median, "range": [low, high]}}
        print(f"  {way}: {statistics.median(each):,.0f} rows/s; ours {median:.2f}× ({low:.2f} to {high:.2f})")
    return found


def main() -> int:
    """Measure each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--part-rows", type=int, default=512)
    wanted = parser.parse_args()
    artifact, date = read(wanted.model), datetime.now(UTC).date().isoformat()
    files = {}
    for path in wanted.rows:
        print(path.name, flush=True)
        options = PredictOptions(batch_rows=wanted.batch, part_rows=wanted.part_rows)
        files[path.name] = measure(resolve_request(artifact, [str(path)], options), wanted.rounds, wanted.batch)
    manifest = artifact.manifest
    result = {
        "what": "rows/s of whole jobs, interleaved",
        "date": date,
        "command": f"python -m bench.predict.throughput MODEL ROWS --rounds {wanted.rounds} --batch {wanted.batch} "
        f"--part-rows {wanted.part_rows}",
        "model": f"{manifest.name}: {manifest.engine}, {manifest.precision}, {artifact.num_bytes:,} bytes",
        "hardware": f"{attached_cpu().model}, {attached_cpu().cores} cores",
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in ("pyarrow", "onnxruntime", "openvino", "numpy")},
        "files": files,
    }
    path = RESULTS / f"predict_throughput_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
