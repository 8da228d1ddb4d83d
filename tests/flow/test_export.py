"""Export end to end: from a run, as people use it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.artifacts import difference, read
from stoker.engines import load
from stoker.errors import BadArtifact, BadRun
from stoker.exporting import About, export
from stoker.store.run_files import RUN, WEIGHTS
from stoker.testing.tiny_models import tiny_artifact, tiny_graph
from tests.flow.builders import PLAN, blobs_job
from tests.flow.command import plan_file, stoker_here
from tests.loading.test_streams import Sized, samples_of

DIGITS = '''\
import stoker


def job(epochs: float = 0.2):
    """A small network learns digits."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: stoker.zoo.ResNet9(width=2, pools=1), data=train, valid=stoker.holdout(0.1), test=test,
        loss="cross_entropy", metrics=["accuracy"], optimizer=stoker.SGD(lr=0.1), batch=16,
        until=stoker.epochs(epochs), name="digits",
    )
'''


@pytest.fixture
def digits(place: Path) -> stoker.Run:
    """A run on images of bytes."""
    Path("digits.py").write_text(DIGITS)
    outcome = stoker_here("train", "digits.py", "--plan", plan_file())
    assert outcome.code == 0, outcome.err
    return stoker.load("latest")


@pytest.mark.slow
def test_a_run_on_images_becomes_a_model_of_raw_bytes(digits: stoker.Run) -> None:
    """The data's preparation is in the graph: images go in as they are stored, classes come out with their names."""
    outcome = stoker_here("export", "latest", "-o", "models/digits")
    assert outcome.code == 0, outcome.err
    artifact = read("models/digits")
    manifest = artifact.manifest
    assert [(one.name, one.datatype, one.shape) for one in manifest.inputs] == [("image", "UINT8", ("batch", 1, 8, 8))]
    assert manifest.labels == {"output": tuple("0123456789")}
    assert manifest.takes_prepared is False
    assert manifest.metrics == digits.metrics
    assert (manifest.source.kind, manifest.source.name) == ("run", digits.name)
    images = stoker.data.digits()[1].arrays()[0][:16]
    prepared = stoker.data.digits()[1].prepare((images, torch.zeros(16)))[0]
    with torch.no_grad():
        wanted = digits.model()(prepared).numpy()
    (engine,) = load(artifact)
    assert difference(engine.run({"image": images.numpy()}), {"output": wanted}) < 1e-4
    for expected in (
        "digits version 1: openvino, fp32",
        "[batch, 1, 8, 8]",
        "0, 1, 2, …",
        "holds",
        "model.onnx",
        "test/accuracy",
        "models/digits/1",
    ):
        assert expected in outcome.out


@pytest.mark.slow
def test_preparation_that_cannot_be_traced_is_left_to_the_client(place: Path) -> None:
    """The exported model then takes what the preparation gives."""

    class Odd(type(stoker.data.digits()[0])):
        def prepare(self, batch: tuple) -> tuple:
            images, labels = batch
            scale = 2.0 if int(images.max()) > 1 else 1.0
            return images.float() * scale, labels

    run = stoker.train(
        blobs_job(
            model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
            data=Odd("train"),
            test=None,
            until=stoker.updates(2),
        ),
        plan=PLAN,
    )
    artifact = stoker.export(run, "models/odd")
    assert [(one.datatype, one.shape) for one in artifact.manifest.inputs] == [("FP32", ("batch", 1, 8, 8))]
    assert artifact.manifest.takes_prepared is True


def test_a_run_made_in_python_is_exported_from_the_run(place: Path) -> None:
    """Its inputs have the names of the model's arguments; a second export is version 2."""
    run = stoker.train(blobs_job(), plan=PLAN)
    artifact = stoker.export(run, "models/blobs", about=About(name="points"))
    assert [(one.name, one.shape) for one in artifact.manifest.inputs] == [("input", ("batch", 6))]
    assert artifact.manifest.name == "points"
    golden = artifact.golden()
    with torch.no_grad():
        wanted = run.model()(torch.from_numpy(golden.inputs["input"])).numpy()
    assert difference(golden.outputs, {"output": wanted}) < 1e-4
    with pytest.raises(BadRun, match="made in Python"):
        stoker.export(run.name, "models/blobs")
    assert stoker.export(run.name, "models/blobs", job=blobs_job()).version == 2


class Words(torch.utils.data.Dataset):
    """Samples of ids; every batch has its own length."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(1 + index % 5 + index // 12), index % 2


def padded(items: list) -> dict:
    """A batch with a mask."""
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True)
    lengths = torch.tensor([len(ids) for ids, _ in items])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "label": torch.tensor([label for _, label in items])}


class Reader(nn.Module):
    """The masked mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 4), nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.unsqueeze(-1).float()
        return self.head((self.table(input_ids) * mask).sum(1) / mask.sum(1))


@pytest.mark.slow
def test_data_whose_batches_differ_in_length_have_that_dimension_named(place: Path) -> None:
    """Found by looking at samples; the mask says what to pad with."""
    run = stoker.train(
        blobs_job(
            model=Reader,
            data=Words(),
            fields=stoker.Fields(collate=padded),
            test=None,
            valid=None,
            metrics=[],
            until=stoker.updates(2),
        ),
        plan=PLAN,
    )
    manifest = stoker.export(run, "models/words").manifest
    assert {(one.name, one.shape, one.pad) for one in manifest.inputs} == {
        (name, ("batch", "tokens"), 0) for name in ("input_ids", "attention_mask")
    }


def test_an_onnx_file_and_examples_go_through_the_command(place: Path) -> None:
    """As one JSON document, and nothing else on standard output."""
    import onnx

    onnx.save(tiny_graph("tokens", batch=1), "g.onnx")
    ids = np.ones((4, 6), dtype=np.int64)
    np.savez("inputs.npz", input_ids=ids, attention_mask=ids)
    outcome = stoker_here("export", "g.onnx", "-o", "models/words", "--inputs", "inputs.npz", "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["path"] == "models/words/1"
    assert document["manifest"]["inputs"][0]["shape"] == ["batch", "tokens"]
    assert (read("models/words").golden().inputs["input_ids"] == ids).all()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nosuch", "-o", "models/m"], "There is no run 'nosuch'"),
        (["bad.onnx", "-o", "models/m"], "is no ONNX file"),
        (["bad.onnx", "-o", "bad.onnx"], "bad.onnx is a file"),
        (["bad.onnx", "-o", "models/tiny/1"], "is a version of a model"),
        (["bad.onnx", "-o", "models"], "is not a model's directory: it holds tiny"),
        (["bad.onnx", "-o", "models/7"], "named like a version"),
        (["bad.onnx", "-o", "models/m", "--inputs", "bad.onnx"], "--inputs bad.onnx cannot be read"),
        (["bad.onnx", "-o", "models/m", "--inputs", "gone.npz"], "--inputs gone.npz cannot be read"),
        (["bad.onnx", "-o", "models/m", "--dynamic", "tokens"], "--dynamic tokens: wanted INPUT.DIM=NAME"),
    ],
)
def test_what_cannot_be_meant_exits_with_2_and_a_sentence(place: Path, arguments: list[str], told: str) -> None:
    """Unknown runs, files that are none, places that are no models', options of another form; nothing is left."""
    tiny_artifact("models")
    Path("bad.onnx").write_text("no graph")
    outcome = stoker_here("export", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert told in " ".join(outcome.err.split())
    assert not Path("models/m").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [("tiny.pth", "stoker.export(module, OUT"), ("tiny.tflite", "Convert it to ONNX"), ("saved", "Convert it to ONNX")],
)
def test_files_of_other_kinds_are_refused_with_the_way_to_export_them(place: Path, name: str, says: str) -> None:
    """Weights need their module, models of TensorFlow become ONNX first; no word of runs that are not there."""
    if name == "saved":
        Path(name).mkdir()
    (Path(name) / "saved_model.pb" if name == "saved" else Path(name)).write_bytes(b"")
    outcome = stoker_here("export", name, "-o", "models/other")
    assert (outcome.code, says in outcome.err, "an ONNX file" in outcome.err) == (2, True, True), outcome.err


def test_a_run_that_is_not_finished_is_refused(place: Path) -> None:
    """It has no weights yet."""
    run = stoker.train(blobs_job(), plan=PLAN)
    run.directory.write(RUN, dataclasses.replace(run.record, status="unfinished"))
    (run.path / WEIGHTS).unlink()
    with pytest.raises(BadRun, match="has no final weights: it is unfinished"):
        stoker.export(run.name, "models/m", job=blobs_job())


def test_examples_out_of_a_stream_are_those_at_its_beginning() -> None:
    """The last one of a billion would be read up to."""
    chosen = export.example_rows(samples_of(Sized, 10**9))
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 63, 8)


def test_examples_for_a_run_are_refused(place: Path) -> None:
    """They come from its data; what is given would not be used."""
    np.savez("x.npz", x=np.zeros((2, 2)))
    outcome = stoker_here("export", "latest", "-o", "models/m", "--inputs", "x.npz")
    assert outcome.code == BadArtifact.exit_code
    assert "Example inputs of a run come from its data" in outcome.err


def test_a_module_needs_examples(place: Path) -> None:
    """And with them becomes an artifact."""
    module = nn.Linear(2, 1).eval()
    with pytest.raises(BadArtifact, match="examples"):
        stoker.export(module, "models/m")
    assert stoker.export(module, "models/m", inputs=torch.randn(2, 2)).manifest.source.kind == "module"
