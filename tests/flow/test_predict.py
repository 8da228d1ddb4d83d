"""`stoker predict`, from files to Parquet: the same rows whatever happens in between."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from stoker import api, engines
from stoker.artifacts import Artifact
from stoker.cli.main import app
from stoker.engines import load
from stoker.errors import BadArtifact, BadJob, BadRun, RunFailed
from stoker.predicting.prediction_request import PredictOptions
from stoker.records import loads
from stoker.records.prediction import PredictionEvent, PredictionJob, PredictionSummary
from stoker.store import RunLock
from stoker.testing import FaultyDisk
from stoker.testing.fakes import PowerCutAt, operations_of
from stoker.testing.tiny_models import Kind, tiny_artifact
from tests.predicting.builders import vectors, whole_model, write_csv, write_jsonl, write_lines, write_parquet

CUT = PredictOptions(batch_rows=8, part_rows=16)


def _model(folder: Path, kind: Kind = "mlp", **changes: Any) -> Path:
    return tiny_artifact(folder, name="model", kind=kind, **changes).path.parent


def _predicted(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = pq.read_table(out / "predictions").to_pydict()
    return found


def _files(out: Path) -> dict[str, bytes]:
    """What a job left, without times."""
    named = ("predictions/*", "bad_rows.jsonl")
    return {path.name: path.read_bytes() for pattern in named for path in out.glob(pattern)}


def _answers(model: Path, values: Any) -> Any:
    """What the engine gives for all of it at once."""
    from stoker.artifacts import read

    (engine,) = load(read(model), threads=1)
    outputs = engine.run({"x": values})
    engine.close()
    return outputs["y"]


def _kinds(path: Path) -> list[str]:
    return [one["reason"] for one in map(json.loads, path.read_text().splitlines())]


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl", "npy"])
def test_every_format_gives_every_row_its_answer(tmp_path: Path, suffix: str) -> None:
    """Source, row, outputs and label of each row, in order, as the engine gives them."""
    model, values = _model(tmp_path), vectors(50)
    path = tmp_path / f"in.{suffix}"
    write: dict[str, Callable[[Path, Any], object]] = {
        "parquet": write_parquet,
        "csv": write_csv,
        "jsonl": write_jsonl,
        "npy": np.save,
    }
    write[suffix](path, values)
    summary = api.predict(model, [path], tmp_path / "out", CUT)
    found = _predicted(tmp_path / "out")
    assert (summary.rows, summary.bad_rows, summary.parts, summary.computed_rows) == (50, 0, 4, 50)
    assert found["source"] == [str(path)] * 50
    assert found["row"] == list(range(50))
    wanted = _answers(model, values)
    np.testing.assert_allclose(found["y"], wanted, rtol=1e-5, atol=1e-5)
    assert found["label"] == [("cat", "dog", "owl")[index] for index in wanted.argmax(axis=1)]
    assert (tmp_path / "out" / "bad_rows.jsonl").read_bytes() == b""


def test_several_files_are_one_job(tmp_path: Path) -> None:
    """Rows count from 0 in each file, and kept columns come along."""
    model = _model(tmp_path)
    for name, rows in (("a", 20), ("b", 5)):
        write_parquet(tmp_path / f"{name}.parquet", vectors(rows), id=pa.array([f"{name}{n}" for n in range(rows)]))
    options = PredictOptions(batch_rows=8, part_rows=16, keep=("id",))
    api.predict(model, [f"{tmp_path}/*.parquet"], tmp_path / "out", options)
    found = _predicted(tmp_path / "out")
    assert found["id"] == [f"a{n}" for n in range(20)] + [f"b{n}" for n in range(5)]
    assert found["row"] == [*range(20), *range(5)]


def test_rows_of_any_length_get_the_answer_they_get_alone(tmp_path: Path) -> None:
    """Sorted by length, padded and put back in order; a row that is too long is bad."""
    model = _model(tmp_path, "tokens")
    draw = np.random.default_rng(0)
    rows = [
        {"input_ids": draw.integers(1, 16, size).tolist(), "attention_mask": [1] * int(size)}
        for size in draw.integers(1, 65, 40)
    ]
    rows[7] = {"input_ids": [1] * 65, "attention_mask": [1] * 65}
    rows[9] = {"input_ids": [1, 2], "attention_mask": [1]}
    path = write_lines(tmp_path / "in.jsonl", [json.dumps(row) for row in rows])
    options = PredictOptions(batch_rows=8, part_rows=64, max_bad="2")
    summary = api.predict(model, [path], tmp_path / "out", options)
    alone = PredictOptions(batch_rows=1, part_rows=1, max_bad="2")
    api.predict(model, [path], tmp_path / "alone", alone)
    found, wanted = _predicted(tmp_path / "out"), _predicted(tmp_path / "alone")
    assert found["row"] == wanted["row"] == [row for row in range(40) if row not in (7, 9)]
    np.testing.assert_allclose(found["embedding"], wanted["embedding"], atol=1e-5)
    assert 0 < summary.padding_waste_ratio < 0.2
    assert _kinds(tmp_path / "out" / "bad_rows.jsonl") == [
        "has 65 tokens, the model takes 1 to 64",
        "has 1 tokens, another input of the row has 2",
    ]


def test_a_folder_of_images(tmp_path: Path) -> None:
    """Each image is a row; one that cannot be decoded is bad, and its path says which; names need not be UTF-8."""
    model, images = _model(tmp_path, "images"), tmp_path / "images"
    images.mkdir()
    for number in range(5):
        Image.fromarray(np.full((8, 8), 50 * number, np.uint8)).save(images / f"{number}.png")
    (images / "4.png").rename(images / "caf\udce9.png")
    (images / "3.png").write_bytes(b"no image")
    options = PredictOptions(pixels="0..1", keep=("path",), max_bad="1", batch_rows=2)
    (images / "caf\udce9.heic").write_bytes(b"of another kind")
    events: list[PredictionEvent] = []
    summary = api.predict(model, [images], tmp_path / "out", options, sink=events.append)
    assert (summary.rows, summary.bad_rows) == (4, 1)
    (warned,) = [event.fields["message"] for event in events if event.kind == "warned"]
    assert warned.encode().endswith(b".heic"), "it cannot be printed"
    assert _predicted(tmp_path / "out")["path"] == ["0.png", "1.png", "2.png", "caf\\xe9.png"]
    bad = json.loads((tmp_path / "out" / "bad_rows.jsonl").read_text())
    assert (bad["source"], bad["column"]) == (str(images / "3.png"), "image")
    with pytest.raises(BadJob, match="what values pixels have"):
        api.predict(model, [images], tmp_path / "other")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_images_that_a_table_names_are_part_of_the_job(tmp_path: Path, kind: str) -> None:
    """Painted over, or there only now, they would be answered beside answers to others; a folder of images knows it."""
    model, names = _model(tmp_path, "images"), [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names[:3]):
        Image.fromarray(np.full((8, 8), 50 * number, np.uint8)).save(tmp_path / name)
    if kind == "csv":
        table = write_lines(tmp_path / "in.csv", ["image", *names])
    else:
        table = tmp_path / "in.parquet"
        structs = pa.array([{"bytes": None, "path": name} for name in names])
        pq.write_table(pa.table({"image": structs}), table)
    options = PredictOptions(pixels="0..1", max_bad="1", batch_rows=2, part_rows=2)
    api.predict(model, [table], tmp_path / "out", options)
    os.utime(tmp_path / "1.png")
    api.predict(model, [table], tmp_path / "out", options)
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(tmp_path / "3.png")
    with pytest.raises(BadRun, match="its content has changed"):
        api.predict(model, [table], tmp_path / "out", options)
    (tmp_path / "3.png").unlink()
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(tmp_path / "0.png")
    with pytest.raises(BadRun, match="its content has changed"):
        api.predict(model, [table], tmp_path / "out", options)


def _spoilt(row: int, line: str) -> str:
    cells = line.split(",")
    spoilt = {3: cells[:2], 20: [*cells[:4], "nan", *cells[5:]], 33: ["x", *cells[1:]]}
    return ",".join(spoilt.get(row, cells))


def test_bad_rows_are_set_aside(tmp_path: Path) -> None:
    """File, row, column and reason of each; every other row is answered."""
    model, values = _model(tmp_path), vectors(40)
    path = write_csv(tmp_path / "in.csv", values, _spoilt)
    summary = api.predict(model, [path], tmp_path / "out", PredictOptions(batch_rows=8, part_rows=16, max_bad="10%"))
    assert (summary.rows, summary.bad_rows) == (37, 3)
    assert _predicted(tmp_path / "out")["row"] == [row for row in range(40) if row not in (3, 20, 33)]
    lines = [json.loads(line) for line in (tmp_path / "out" / "bad_rows.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [
        (3, "has 2 fields, the header has 8"),
        (20, "x4 is nan"),
        (33, "x0 is 'x', which is no number"),
    ]
    assert {line["source"] for line in lines} == {str(path)}


def test_nan_for_a_model_that_was_not_proved_with_it_is_warned_of(tmp_path: Path) -> None:
    """OpenVINO's ReLU makes 0 of it: such a row got a class, where PyTorch has NaN, without a word."""
    model, values = _model(tmp_path), vectors(4)
    values[1, 3] = np.nan
    events: list[PredictionEvent] = []
    path = write_parquet(tmp_path / "in.parquet", values)
    api.predict(model, [path], tmp_path / "out", PredictOptions(allow_nan=True), sink=events.append)
    (warned,) = [event.fields["message"] for event in events if event.kind == "warned"]
    assert "no example that model was exported with has NaN" in warned


def test_too_many_bad_rows_end_it_and_a_larger_limit_continues(tmp_path: Path) -> None:
    """The limit may change: what was done before is kept."""
    model = _model(tmp_path)
    path = write_csv(tmp_path / "in.csv", vectors(40), lambda row, line: "1,2" if row >= 30 else line)
    with pytest.raises(RunFailed, match=r"bad, --max-bad 1% allows 0 of 40: .* has 2 fields") as caught:
        api.predict(model, [path], tmp_path / "out", CUT)
    assert str(tmp_path / "out" / "bad") in str(caught.value)
    done = [file.name for file in (tmp_path / "out" / "predictions").iterdir()]
    assert done
    options = PredictOptions(batch_rows=8, part_rows=16, max_bad="10")
    summary = api.predict(model, [path], tmp_path / "out", options)
    assert (summary.rows, summary.bad_rows) == (30, 10)
    assert summary.computed_rows < 40


def test_a_job_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    """The same command once more prints the summary, loads no engine and computes nothing."""
    model, path = _model(tmp_path), write_parquet(tmp_path / "in.parquet", vectors(20))
    api.predict(model, [path], tmp_path / "out", CUT)
    before = _files(tmp_path / "out")
    events: list[PredictionEvent] = []
    api.predict(model, [path], tmp_path / "out", CUT, sink=events.append)
    assert [(event.kind, event.fields["computed_rows"]) for event in events] == [("finished", 0)]
    assert _files(tmp_path / "out") == before


@pytest.mark.parametrize("lost", ["predictions/part-00001.parquet", "predictions/part-00002.parquet", "bad_rows.jsonl"])
def test_what_a_finished_job_lost_is_computed_again(tmp_path: Path, lost: str) -> None:
    """The summary alone is no row: a part that is gone or cut short, with or without bad rows, comes back."""
    model, out = _model(tmp_path), tmp_path / "out"
    path = write_csv(tmp_path / "in.csv", vectors(40), lambda row, line: "1,2" if row in (20, 21) else line)
    options = PredictOptions(batch_rows=8, part_rows=16, max_bad="2")
    api.predict(model, [path], out, options)
    before = _files(out)
    for left in (0, 100):
        (out / lost).write_bytes((out / lost).read_bytes()[:left])
        summary = api.predict(model, [path], out, options)
        assert (summary.rows, summary.bad_rows, _files(out)) == (38, 2, before)
        assert 0 < summary.computed_rows < 40


def test_a_smaller_limit_holds_for_a_finished_job_too(tmp_path: Path) -> None:
    """The exit code says whether there are more bad rows than this command allows; the rows stay."""
    model = _model(tmp_path)
    path = write_csv(tmp_path / "in.csv", vectors(40), lambda row, line: "1,2" if row == 20 else line)
    api.predict(model, [path], tmp_path / "out", PredictOptions(batch_rows=8, part_rows=16, max_bad="1"))
    before = _files(tmp_path / "out")
    with pytest.raises(RunFailed, match=r"(?s)1 of 40 rows are bad, --max-bad 1% allows 0.*bad_rows\.jsonl"):
        api.predict(model, [path], tmp_path / "out", CUT)
    assert _files(tmp_path / "out") == before


def test_another_model_or_input_is_refused_and_new_starts_beside(tmp_path: Path) -> None:
    """Parts of two jobs never come together in one directory."""
    model, path = _model(tmp_path), write_parquet(tmp_path / "in.parquet", vectors(20))
    api.predict(model, [path], tmp_path / "out", CUT)
    before = _files(tmp_path / "out")
    _model(tmp_path, seed=1)
    with pytest.raises(BadRun, match="begun with something else: the model: was model 1, is model 2"):
        api.predict(model, [path], tmp_path / "out", CUT)
    write_parquet(path, vectors(21))
    with pytest.raises(BadRun, match="its content has changed"):
        api.predict(model / "1", [path], tmp_path / "out", CUT)
    assert api.predict(model, [path], tmp_path / "out", CUT, new=True).rows == 21
    assert _files(tmp_path / "out") == before
    assert len(_predicted(tmp_path / "out-2")["row"]) == 21


def test_someone_elses_directory_is_not_written_into(tmp_path: Path) -> None:
    """A directory with other things in it, or in use by another process, is refused."""
    model, path = _model(tmp_path), write_parquet(tmp_path / "in.parquet", vectors(20))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").touch()
    with pytest.raises(BadRun, match="holds other things"):
        api.predict(model, [path], tmp_path / "out")
    with RunLock(tmp_path / "busy"), pytest.raises(BadRun, match="in use"):
        api.predict(model, [path], tmp_path / "busy")


def test_a_file_that_changes_meanwhile_ends_the_job(tmp_path: Path) -> None:
    """Half a file of today and half of tomorrow would be no one's rows."""
    model, path = _model(tmp_path), write_csv(tmp_path / "in.csv", vectors(400))

    def touch(event: PredictionEvent) -> None:
        if event.kind == "started":
            os.utime(path, (1, 1))

    with pytest.raises(RunFailed, match="has changed while it was read"):
        api.predict(model, [path], tmp_path / "out", CUT, sink=touch)


def test_a_file_that_is_removed_meanwhile_ends_the_job(tmp_path: Path) -> None:
    """In words, whether or not it was open."""
    model = _model(tmp_path)
    paths = [write_csv(tmp_path / f"{name}.csv", vectors(400)) for name in "ab"]

    def remove(event: PredictionEvent) -> None:
        if event.kind == "started":
            paths[1].unlink()

    with pytest.raises(RunFailed, match=r"b\.csv can no longer be read"):
        api.predict(model, paths, tmp_path / "out", CUT, sink=remove)


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    """A header alone is most likely a mistake."""
    with pytest.raises(BadJob, match="There are no rows"):
        api.predict(_model(tmp_path), [write_csv(tmp_path / "in.csv", vectors(0))], tmp_path / "out", CUT)
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadJob, match="There are no rows"):
        api.predict(_model(tmp_path), [write_parquet(tmp_path / "in.parquet", vectors(0))], tmp_path / "out", CUT)


def test_a_model_that_answers_otherwise_here_is_refused(tmp_path: Path) -> None:
    """The golden answers are asked for before any row is."""
    from safetensors.numpy import load_file, save_file

    artifact = tiny_artifact(tmp_path, name="model")
    golden = load_file(artifact.path / "golden.safetensors")
    golden["out.y"] += 1
    save_file(golden, artifact.path / "golden.safetensors")
    path = write_parquet(tmp_path / "in.parquet", vectors(20))
    with pytest.raises(BadArtifact, match="is not what was exported"):
        api.predict(artifact.path, [path], tmp_path / "out")


def test_a_job_continued_elsewhere_says_so(tmp_path: Path) -> None:
    """On another CPU or with other libraries the rest agrees within tolerance only, and that is reported."""
    model, path, out = _model(tmp_path), write_parquet(tmp_path / "in.parquet", vectors(20)), tmp_path / "out"
    api.predict(model, [path], out, CUT)
    job = (out / "job.json").read_text().replace('"made_on": "', '"made_on": "an old ')
    for name in ("summary.json", "predictions/part-00001.parquet"):
        (out / name).unlink()
    (out / "job.json").write_text(job)
    events: list[PredictionEvent] = []
    api.predict(model, [path], out, CUT, sink=events.append)
    assert "continued elsewhere (CPU an old" in events[0].fields["message"]


def test_choices_are_measured_once_and_kept(tmp_path: Path) -> None:
    """What was measured when the job began is what a later command uses."""
    model, path, out = _model(tmp_path), write_parquet(tmp_path / "in.parquet", vectors(20)), tmp_path / "out"
    api.predict(model, [path], out)
    job = loads((out / "job.json").read_bytes(), PredictionJob)
    assert job.basis.startswith("measured on one instance")
    (out / "summary.json").unlink()
    api.predict(model, [path], out, PredictOptions(batch_rows=job.batch_rows))
    assert loads((out / "job.json").read_bytes(), PredictionJob) == job


def test_a_full_disk_ends_it_and_room_continues_it(tmp_path: Path) -> None:
    """Nothing half-written is taken for done, and the rows are the same in the end."""
    model, path = _model(tmp_path), write_parquet(tmp_path / "in.parquet", vectors(80))
    api.predict(model, [path], tmp_path / "whole", CUT)
    with FaultyDisk.full(tmp_path / "out", after_bytes=8000), pytest.raises(RunFailed, match="the disk is full"):
        api.predict(model, [path], tmp_path / "out", CUT)
    assert len(list((tmp_path / "out" / "predictions").glob("part-*"))) in range(1, 5)
    api.predict(model, [path], tmp_path / "out", CUT)
    assert _predicted(tmp_path / "out") == _predicted(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("loses", ["nothing", "data and names"])
def test_a_power_cut_at_any_operation_loses_and_doubles_nothing(tmp_path: Path, loses: Any) -> None:
    """Stopped before each single operation on the disk, the same command ends with the same bytes."""
    model = _model(tmp_path)
    path = write_csv(tmp_path / "in.csv", vectors(24), lambda row, line: "1,2" if row in (5, 20) else line)
    options = PredictOptions(batch_rows=8, part_rows=16, max_bad="2", threads=64)  # one instance: a steady order

    def predict(out: Path) -> PredictionSummary:
        return api.predict(model, [path], out, options)

    operations = operations_of(lambda: predict(tmp_path / "whole"))
    wanted = _files(tmp_path / "whole")
    for at in range(0, len(operations) + 1, 1 if loses == "nothing" else 3):
        out = tmp_path / f"{loses[:4]}-{at}"
        with PowerCutAt(at, loses=loses):
            predict(out)
        for part in (out / "predictions").glob("part-*"):
            assert pq.read_table(part).num_rows > 0
        summary = predict(out)
        assert (summary.rows, summary.bad_rows) == (22, 2), operations[at : at + 1]
        assert _files(out) == wanted, operations[at : at + 1]


def _command(model: Path, path: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "stoker",
        "predict",
        str(model),
        str(path),
        "-o",
        str(out),
        "--batch",
        "8",
        "--part-rows",
        "16",
        "--json",
        *more,
    ]


def _stopped_after(command: Sequence[str], parts: int, how: signal.Signals) -> int:
    """Stop the command once so many parts are done; its exit code."""
    # A short pipe: the command cannot run far ahead of what is read here.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, pipesize=4096)
    with process:
        assert process.stdout is not None
        for event in map(json.loads, process.stdout):
            if event["event"] == "progress" and event["parts"] >= parts:
                break
        process.send_signal(how)
        process.communicate()
    return process.returncode


@pytest.mark.slow
def test_killed_and_continued_the_rows_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    """Ctrl-C, then SIGKILL; the same command ends with the bytes of an uninterrupted job."""
    model, path = _model(tmp_path), write_csv(tmp_path / "in.csv", vectors(3000))
    whole, out = tmp_path / "whole", tmp_path / "out"
    api.predict(model, [path], whole, CUT)
    command = _command(model, path, out)
    assert _stopped_after(command, 5, signal.SIGINT) == 130
    assert _stopped_after(command, 60, signal.SIGKILL) == -signal.SIGKILL
    assert not (out / "summary.json").exists()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    started, *_, finished = map(json.loads, done.stdout.splitlines())
    assert 60 <= started["done_parts"] < 188
    assert (finished["event"], finished["rows"], finished["bad_rows"]) == ("finished", 3000, 0)
    assert finished["computed_rows"] == 3000 - 16 * started["done_parts"]
    assert _files(out) == _files(whole)


def _invoke(*words: object) -> Any:
    return CliRunner().invoke(app, ["predict", *map(str, words)])


def _documented_events() -> dict[str, set[str]]:
    """The fields of each event, as docs/predicting.md lists them."""
    page = Path(__file__).parents[2] / "docs" / "predicting.md"
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|$", page.read_text("utf-8"), re.MULTILINE)
    return {kind: set(re.findall(r"\w+", fields)) for kind, fields in rows}


@pytest.mark.slow
def test_the_command_line_tells_what_came_of_it(tmp_path: Path) -> None:
    """Words for people on standard error, one JSON object a line on standard output, exit codes that mean something."""
    model, path, out = _model(tmp_path), write_csv(tmp_path / "in.csv", vectors(40)), tmp_path / "out"
    told = _invoke(model, path, "-o", out, "--keep", "x0, x1", "--part-rows", 16)
    assert (told.exit_code, told.stdout) == (0, "")
    assert "40 rows in 3 parts" in told.stderr
    assert "40 rows answered, no bad rows" in told.stderr
    events = [json.loads(line) for line in _invoke(model, path, "-o", out, "--json", "--new").stdout.splitlines()]
    assert list(dict.fromkeys(event["event"] for event in events)) == ["started", "progress", "finished"]
    assert {event["event"]: set(event) - {"event", "at"} for event in events}.items() <= _documented_events().items()
    assert _invoke(model, path, "-o", out).exit_code == BadRun.exit_code
    assert _invoke(model, tmp_path / "no.csv", "-o", out).exit_code == BadJob.exit_code
    assert "wanted stretch, crop or pad" in _invoke(model, path, "-o", out, "--resize", "squash").stderr
    write_csv(path, vectors(40), lambda row, line: "" if row else "1")
    assert _invoke(model, path, "-o", tmp_path / "bad").exit_code == RunFailed.exit_code


class _OffInLargeBatches:
    """An engine whose answers to 32 rows and more are others, as bf16 kernels have it."""

    def __init__(self, engine: engines.Engine) -> None:
        self._engine = engine

    def run(self, inputs: Any) -> Any:
        answers = self._engine.run(inputs)
        return {name: array + (len(array) >= 32) for name, array in answers.items()}

    def close(self) -> None:
        self._engine.close()


def test_what_a_server_refuses_is_not_predicted_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version that is off in full batches is passed over with its reason; asked for by number it is refused."""
    model = _model(tmp_path)
    tiny_artifact(tmp_path, name="model", seed=1)
    write_parquet(tmp_path / "in.parquet", vectors(50))
    read = engines.load

    def loading(artifact: Artifact, **how: Any) -> Any:
        loaded = read(artifact, **how)
        return tuple(map(_OffInLargeBatches, loaded)) if artifact.version == 2 else loaded

    monkeypatch.setattr("stoker.predicting.prediction.load", loading)
    told: list[PredictionEvent] = []
    api.predict(model, [tmp_path / "in.parquet"], tmp_path / "out", CUT, sink=told.append)
    assert loads((tmp_path / "out" / "job.json").read_bytes(), PredictionJob).version == 1
    (warning,) = (event.fields["message"] for event in told if event.kind == "warned")
    assert "version 2 is passed over, as a server would" in warning
    assert "is off by" in warning
    with pytest.raises(BadArtifact, match="is not the golden answer"):
        api.predict(model / "2", [tmp_path / "in.parquet"], tmp_path / "other", CUT)


def test_predictions_are_made_with_the_version_that_is_served(tmp_path: Path) -> None:
    """A rollback holds for both; without one it is the newest, and a damaged one is passed over."""
    model = _model(tmp_path)
    newest = tiny_artifact(tmp_path, name="model", seed=1)
    write_parquet(tmp_path / "in.parquet", vectors(5))

    def version(out: str) -> int:
        api.predict(model, [tmp_path / "in.parquet"], tmp_path / out, CUT)
        return loads((tmp_path / out / "job.json").read_bytes(), PredictionJob).version

    assert version("a") == 2
    api.rollback(model)
    assert version("b") == 1
    api.rollback(model, newest=True)
    newest.graph_path.write_bytes(b"damaged")
    assert version("c") == 1


def test_the_largest_batch_that_is_predicted_is_checked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though served batches are smaller: nothing of the job is begun."""
    model = _model(tmp_path)
    (model / "service.json").write_text('{"max_batch_rows": 8}')
    write_parquet(tmp_path / "in.parquet", vectors(50))
    read = engines.load
    monkeypatch.setattr(
        "stoker.predicting.prediction.load",
        lambda artifact, **how: tuple(map(_OffInLargeBatches, read(artifact, **how))),
    )
    with pytest.raises(BadArtifact, match="is not the golden answer"):
        api.predict(model, [tmp_path / "in.parquet"], tmp_path / "out", PredictOptions(batch_rows=64))
    assert not (tmp_path / "out" / "job.json").exists()
    api.predict(model, [tmp_path / "in.parquet"], tmp_path / "out", CUT)


def test_a_model_without_a_batch_answers_whole_requests(tmp_path: Path) -> None:
    """Arrays of exactly its shapes are one request, stacked ones many; each row's answer is that of its request."""
    model = whole_model(tmp_path)
    x = np.random.default_rng(0).standard_normal((5, 3, 4)).astype(np.float32)
    k = np.arange(1, 6, dtype=np.float32)
    np.savez(tmp_path / "one.npz", x=x[0], k=k[0])
    np.savez(tmp_path / "five.npz", x=x, k=k)
    expected = k[:, None, None] * np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    for name, count in (("one", 1), ("five", 5)):
        api.predict(model, [tmp_path / f"{name}.npz"], tmp_path / name)
        found = np.array(_predicted(tmp_path / name)["y"]).reshape(count, 3, 4)
        np.testing.assert_allclose(found, expected[:count], rtol=1e-4)


def test_a_single_number_is_no_row_of_a_model_with_a_batch(tmp_path: Path) -> None:
    """It says what arrays have to look like."""
    np.savez(tmp_path / "rows.npz", x=np.float32(1))
    with pytest.raises(BadJob, match="x holds a single number, wanted rows"):
        api.predict(_model(tmp_path), [tmp_path / "rows.npz"], tmp_path / "out")
