"""Exporting live modules: checked in numbers, or refused with them."""

import dataclasses
import json
import logging
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stoker.artifacts import excess, read
from stoker.engines import Graph, load, load_graph
from stoker.engines.base import BadInput
from stoker.errors import BadArtifact
from stoker.exporting import About, Untraceable, export_module, torch_export
from stoker.exporting.onnx_file import draw_inputs
from stoker.records import ArtifactSource, DynamicDim, EngineName


class Embedder(nn.Module):
    """The mean of the embeddings that the mask leaves, and every token's."""

    def __init__(self, *, masked: bool = True) -> None:
        super().__init__()
        self.table, self.masked = nn.Embedding(16, 4), masked

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = attention_mask.unsqueeze(-1).float()
        rows = self.table(input_ids) * (mask if self.masked else 1)
        count = mask.sum(1).clamp(min=1) if self.masked else mask.sum(1) * 0 + input_ids.shape[1]
        return {"mean": rows.sum(1) / count, "each": rows}


TOKENS = {"input_ids": {1: "tokens"}, "attention_mask": {1: "tokens"}}


def texts(count: int = 6, tokens: int = 8) -> dict[str, torch.Tensor]:
    """Token ids and a mask of ones."""
    ids = torch.randint(1, 16, (count, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory):
    """An embedder, exported with tokens that vary."""
    torch.manual_seed(0)
    model = tmp_path_factory.mktemp("models") / "embedder"
    dims = (DynamicDim(name="tokens", low=1, high=512),)
    return export_module(Embedder().eval(), texts(), model, About(dynamic=TOKENS, dims=dims))


@pytest.mark.parametrize("name", ["torch.onnx", "onnxscript.optimizer._constant_folding", "onnx_ir.passes.common"])
def test_the_exporter_says_nothing_of_what_it_does_not_simplify(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A user can do nothing about an `nn.EmbeddingBag` whose loop stays; errors are said."""
    with torch_export._quiet():
        logging.getLogger(name).warning("Skipping constant folding for op SequenceEmpty with multiple outputs.")
        logging.getLogger(name).error("broken")
    logging.getLogger(name).warning("afterwards")
    assert caplog.messages == ["broken", "afterwards"]


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("token", [-1, 16])
def test_a_token_that_the_embedding_lacks_is_refused(artifact, engine: EngineName, token: int) -> None:
    """As PyTorch refuses it; -1 is not the last row, which it is for ONNX."""
    manifest = artifact.manifest
    graph = Graph(path=artifact.graph_path, precision="fp32", inputs=manifest.inputs, outputs=manifest.outputs)
    (loaded,) = load_graph(engine, graph)
    asked = {name: tensor.numpy() for name, tensor in texts(2).items()}
    asked["input_ids"][1, 3] = token
    with pytest.raises(BadInput):
        loaded.run(asked)


def test_ids_of_an_exported_graph_are_drawn_below_the_rows_of_their_table(artifact) -> None:
    """Taken over as an ONNX file, its negative indices, which lie beyond the table, do not hide the table."""
    drawn = draw_inputs(onnx.load(artifact.graph_path), artifact.manifest.inputs, {"batch": 8, "tokens": 40})
    assert drawn["input_ids"].max() == 15


def test_the_signature_says_what_varies_and_what_inputs_are_padded_with(artifact) -> None:
    """Found by asking: outputs by their keys, tokens where they appear, pads because of the mask."""
    inputs = {spec.name: (spec.datatype, spec.shape, spec.pad) for spec in artifact.manifest.inputs}
    assert inputs == dict.fromkeys(("input_ids", "attention_mask"), ("INT64", ("batch", "tokens"), 0))
    outputs = {spec.name: spec.shape for spec in artifact.manifest.outputs}
    assert outputs == {"mean": ("batch", 4), "each": ("batch", "tokens", 4)}
    assert artifact.manifest.dims == (DynamicDim(name="tokens", low=1, high=512),)


def test_every_engine_was_checked_at_three_sizes_alone_and_padded(artifact) -> None:
    """Proofs of the original, and three of each engine, all of which hold."""
    whats = [proof.what for proof in artifact.manifest.proofs]
    for engine in ("openvino", "onnxruntime"):
        assert any(
            what.startswith(f"{engine} and PyTorch, 1 sample (tokens 8); 3 samples (tokens 4)") for what in whats
        )
        assert f"{engine}: each sample alone and among 2, 3, 4, 8, 16, 32" in whats
        assert f"{engine}: padded (tokens 4 in 8)" in whats
    assert all(proof.error <= proof.limit for proof in artifact.manifest.proofs)


def test_the_files_are_all_there_and_hold_no_pickle(artifact) -> None:
    """Weights by name, the graph, PyTorch's program, golden answers of four samples; digests of each."""
    artifact.verify()
    names = {one.name for one in artifact.manifest.files}
    assert names == {"model.onnx", "model.pt2", "model.safetensors", "golden.safetensors"}
    assert set(load_file(artifact.path / "model.safetensors")) == {"table.weight"}
    assert len(artifact.golden().inputs["input_ids"]) == 4
    with zipfile.ZipFile(artifact.path / "model.pt2") as program:
        contents = {name: program.read(name) for name in program.namelist()}
    assert not [
        name for name, content in contents.items() if b"\x80\x02" in content[:4] or content[:4] == b"PK\x03\x04"
    ]
    configs = [json.loads(content) for name, content in contents.items() if name.endswith("_config.json")]
    assert len(configs) == 2
    assert not any(one["use_pickle"] for config in configs for one in config["config"].values())


def test_the_graph_keeps_no_paths_of_whoever_exported(artifact) -> None:
    """The exporter's stack traces would tell where the code lay."""
    assert str(Path(__file__).parent).encode() not in artifact.graph_path.read_bytes()


def test_the_program_is_one_that_pytorch_opens(artifact) -> None:
    """For users who trust it; Stoker does not open it."""
    program = torch.export.load(artifact.path / "model.pt2").module()
    asked = texts(2, 5)
    found = program(asked["input_ids"], asked["attention_mask"])
    weights = load_file(artifact.path / "model.safetensors")["table.weight"]
    torch.testing.assert_close(found[0], weights[asked["input_ids"]].mean(1))


def test_what_was_exported_can_be_read_and_run(artifact) -> None:
    """By the engine that the manifest names, within its tolerance."""
    found = read(artifact.path.parent)
    assert found.manifest == artifact.manifest
    assert found.manifest.engine == "openvino"
    golden = found.golden()
    (engine,) = load(found)
    assert excess(engine.run(golden.inputs), golden.outputs, found.manifest.tolerance) <= 1


def test_the_tolerance_has_room_for_what_was_measured_and_no_more(artifact) -> None:
    """Not below the floor, and not as wide as what would be refused."""
    tolerance = artifact.manifest.tolerance
    worst = max(proof.error for proof in artifact.manifest.proofs if proof.limit < 1)
    assert worst < 1e-4 <= tolerance.relative < 1e-3
    scales = [float(np.abs(one).max()) for one in artifact.golden().outputs.values()]
    assert tolerance.relative * min(scales) <= tolerance.absolute * (1 + 1e-9) < tolerance.relative * max(scales)


def test_the_source_is_the_module_and_the_libraries_are_named(artifact) -> None:
    """A digest of the weights, and the versions that took part."""
    source = artifact.manifest.source
    assert (source.kind, source.name, len(source.digest)) == ("module", "Embedder", 64)
    assert {"torch", "onnx", "openvino", "onnxruntime", "python", "stoker"} <= set(artifact.manifest.libraries)


@pytest.mark.slow
def test_a_mask_that_the_model_does_not_heed_is_not_padded_by(tmp_path: Path) -> None:
    """The names propose, the numbers decide: nothing is said about padding."""
    artifact = export_module(Embedder(masked=False).eval(), texts(), tmp_path / "m", About(dynamic=TOKENS))
    assert [spec.pad for spec in artifact.manifest.inputs] == [None, None]
    assert not [proof for proof in artifact.manifest.proofs if "padded" in proof.what]


def test_padding_that_the_user_claims_and_that_changes_answers_is_refused(tmp_path: Path) -> None:
    """With the numbers."""
    about = About(dynamic=TOKENS, pad={"input_ids": 0, "attention_mask": 0})
    with pytest.raises(BadArtifact, match=r"changes answers: .*padded \(tokens 4 in 8\): \d\.\d+, at most 0\.001"):
        export_module(Embedder(masked=False).eval(), texts(), tmp_path / "m", about)
    assert not (tmp_path / "m").exists()


class Lin(nn.Module):
    """A layer, and what is done with its output."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.norm, self.what = nn.Linear(4, 3), nn.BatchNorm1d(3), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.what == "norm":
            return self.norm(torch.cat([y, y + 1]))[: len(y)]
        if self.what == "softmax":
            return y.softmax(0)
        if self.what == "specialised":
            return y + 1 if x.shape[0] == 3 else y
        if self.what == "constant":
            return y.reshape(3, 3) if x.shape[0] == 3 else y
        if self.what == "reshaped":
            return x.reshape(x.shape[0], 2, 2).flip(2)
        if self.what == "mean":
            return y.mean(0)
        if self.what == "dropout":
            return nn.functional.dropout(y)
        if self.what == "values":
            return y if float(y.sum()) > 0 else -y
        if self.what == "nan":
            return y / 0 * 0
        return [y, {"inner": y}]


@pytest.mark.parametrize(
    ("what", "training", "told"),
    [
        ("norm", True, r"depends on what else is in the batch: .* differ by \S+ of the largest value, at most 0\.001"),
        ("softmax", False, r"depends on what else is in the batch: .* differ by 0\.\d+ of"),
        ("dropout", False, "answers the same samples differently from call to call"),
        ("nan", False, "the answer has NaN"),
        ("mean", False, r"first dimension of the output 'output' \[3\] is not the samples"),
        ("nested", False, "'output_1' is a dict; an exported one gives tensors"),
        ("specialised", False, "cannot be exported: its code fixes dimension 0 of"),
        ("constant", False, "cannot be exported: its code fixes dimension 0 of"),
        ("values", False, "depends on what else is in the batch|cannot be exported"),
    ],
)
def test_what_cannot_be_served_is_refused_and_nothing_written(
    tmp_path: Path, what: str, training: bool, told: str
) -> None:
    """BatchNorm in training, sums over the batch, sizes fixed by the code, NaN, and outputs that are no tensors."""
    torch.manual_seed(1)
    module = Lin(what).train(training)
    with pytest.raises(BadArtifact, match=told):
        export_module(module, torch.randn(8, 4), tmp_path / "m")
    assert not (tmp_path / "m").exists()


class Packing(nn.Module):
    """A recurrent layer over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(16, 4), nn.GRU(4, 3, batch_first=True)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        lengths = (input_ids != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.table(input_ids), lengths, batch_first=True, enforce_sorted=False
        )
        outputs = self.layer(packed)[0]
        return nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True, total_length=input_ids.shape[1])[0]


def test_a_model_that_packs_sequences_is_refused_by_what_it_does(tmp_path: Path) -> None:
    """Not by the type that some function of PyTorch's failed on."""
    with pytest.raises(BadArtifact, match="it packs sequences") as caught:
        export_module(Packing().eval(), {"input_ids": texts()["input_ids"]}, tmp_path / "m")
    assert "padded steps" in str(caught.value.remedy)


def test_asking_a_module_in_training_moves_none_of_its_statistics(tmp_path: Path) -> None:
    """It is refused, and as it was."""
    module = Lin("norm").train()
    with pytest.raises(BadArtifact):
        export_module(module, torch.randn(8, 4), tmp_path / "m")
    assert module.norm.num_batches_tracked == 0


@pytest.mark.slow
def test_a_graph_whose_batch_was_fixed_in_silence_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter may hand over a graph for three samples alone; engines are asked for one and for eight."""
    real = torch_export.trace

    def fixed(flat, samples, inputs):
        alone = tuple(dataclasses.replace(spec, shape=(3, *spec.shape[1:])) for spec in inputs)
        return real(flat, samples, alone)

    monkeypatch.setattr(torch_export, "trace", fixed)
    with pytest.raises(BadArtifact, match="does not compute what the model does, so nothing was exported") as caught:
        export_module(Lin("reshaped").eval(), torch.randn(8, 4), tmp_path / "m")
    assert "openvino" in caught.value.message
    assert "onnxruntime" in caught.value.message
    assert list((tmp_path / "m").iterdir()) == []


@pytest.mark.slow
def test_a_graph_with_other_weights_is_refused_with_the_size_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exporters have made: everything loads, and every answer is wrong."""
    real = torch_export.trace

    def other(flat, samples, inputs):
        program = real(flat, samples, inputs)
        for tensor in program.state_dict.values():
            tensor.data.mul_(1.01)
        return program

    monkeypatch.setattr(torch_export, "trace", other)
    module = nn.Linear(4, 3).eval()
    kept = module.weight.detach().clone()
    answer = torch_export._original

    def unmoved(flat, trial):
        original = nn.Linear(4, 3)
        original.load_state_dict({"weight": kept, "bias": module.bias.detach().clone()})
        return answer(type(flat)(original, flat._call), trial)

    monkeypatch.setattr(torch_export, "_original", unmoved)
    with pytest.raises(BadArtifact, match=r"openvino and PyTorch, .*: 0\.0\d+, at most 0\.001"):
        export_module(module, torch.randn(8, 4), tmp_path / "m")


@pytest.mark.parametrize(
    ("inputs", "about", "told"),
    [
        (torch.zeros(0, 4), About(), "no common number of samples"),
        ({"x": torch.zeros(2, 4), "y": torch.zeros(3, 4)}, About(), r"\(x: 2, y: 3\)"),
        (torch.zeros(2, 5), About(), r"cannot answer the example inputs \(input \[8, 5\]\)"),
        (torch.zeros(2, 4), About(dynamic={"input": {2: "n"}}), "no dimension 2"),
        (torch.zeros(2, 4), About(dynamic={"z": {1: "n"}}), "'z' has no dimension 1"),
        (torch.zeros(2, 4, dtype=torch.complex64), About(), "complex64"),
        ({"z": torch.zeros(2, 4)}, About(), "unexpected keyword argument"),
    ],
)
def test_examples_that_do_not_fit_are_told(tmp_path: Path, inputs, about: About, told: str) -> None:
    """No samples, unequal numbers of them, wrong shapes, names and types."""
    with pytest.raises(BadArtifact, match=told):
        export_module(nn.Linear(4, 3).eval(), inputs, tmp_path / "m", about)


def test_a_dimension_that_the_examples_show_at_one_size_alone_is_told(tmp_path: Path) -> None:
    """What varies has to be seen to vary."""
    with pytest.raises(BadArtifact, match="can only show it at 1"):
        export_module(Embedder().eval(), texts(4, 1), tmp_path / "m", About(dynamic=TOKENS))


@pytest.mark.parametrize("place", ["file", "1", "full", "full/tiny/1"])
def test_a_place_that_is_no_models_directory_is_refused(tmp_path: Path, place: str) -> None:
    """A file, a version's name, a directory of other things, a version itself; before anything is computed."""
    from stoker.testing.tiny_models import tiny_artifact

    (tmp_path / "file").touch()
    tiny_artifact(tmp_path / "full")
    (tmp_path / "full" / "notes").touch()
    with pytest.raises(BadArtifact) as caught:
        export_module(nn.Linear(4, 3), torch.zeros(2, 4), tmp_path / place)
    assert "-o" in str(caught.value)


@pytest.mark.slow
def test_what_is_known_of_a_model_is_kept(tmp_path: Path) -> None:
    """Name, labels, metrics and source; exported again, it is version 2."""
    source = ArtifactSource(kind="run", name="r-1", digest="0" * 64)
    about = About(name="net", labels={"output": ["a", "b", "c"]}, metrics={"test/accuracy": 0.5}, source=source)
    module, inputs = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    export_module(module, inputs, tmp_path / "m", about)
    manifest = export_module(module, inputs, tmp_path / "m", about).manifest
    assert (manifest.name, manifest.labels, manifest.source) == ("net", {"output": ("a", "b", "c")}, source)
    assert manifest.metrics == {"test/accuracy": 0.5}
    assert read(tmp_path / "m").version == 2


def test_an_error_of_the_exporter_is_one_of_ours(tmp_path: Path) -> None:
    """So that a user without need of the data's preparation may try again."""
    with pytest.raises(Untraceable):
        export_module(Lin("specialised").eval(), torch.randn(8, 4), tmp_path / "m")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("about", "told"),
    [
        (About(labels={"nope": ("a", "b")}), "has labels of 'nope', which is no output"),
        (About(dynamic=TOKENS, dims=(DynamicDim(name="tokens", low=4, high=2),)), "lets 'tokens' go from 4 to 2"),
    ],
)
def test_a_manifest_that_nobody_could_read_is_not_written(tmp_path: Path, about: About, told: str) -> None:
    """The files with a model's weights may describe it wrongly; then there is no version, instead of a damaged one."""
    with pytest.raises(BadArtifact, match=told):
        export_module(Embedder().eval(), texts(), tmp_path / "m", about)
    assert not list((tmp_path / "m").iterdir())


def test_an_output_named_like_an_input_is_told(tmp_path: Path) -> None:
    """A graph could not distinguish them; the name is reported before anything is traced."""

    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": x + 1, "x": x * 2}

    with pytest.raises(BadArtifact, match="output 'x' is named like an input"):
        export_module(Same(), {"x": torch.randn(4, 3)}, tmp_path / "m")


class LastPosition(nn.Module):
    """The last position of each sample that counts."""

    def forward(self, series: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return series[torch.arange(series.shape[0]), length - 1]


SERIES = {"series": torch.randn(8, 6, 3), "length": torch.tensor([6, 2, 3, 1, 5, 6, 4, 6])}


@pytest.mark.parametrize("engine", [pytest.param("openvino", marks=pytest.mark.slow), "onnxruntime"])
def test_lengths_are_lowered_where_samples_are_cut(tmp_path: Path, engine: EngineName) -> None:
    """A length beyond the cut series has no answer, and is not what the model is asked for; then it is refused."""
    artifact = export_module(LastPosition(), SERIES, tmp_path / "m", About(dynamic={"series": {1: "time"}}))
    manifest = artifact.manifest
    graph = Graph(path=artifact.graph_path, precision="fp32", inputs=manifest.inputs, outputs=manifest.outputs)
    (loaded,) = load_graph(engine, graph)
    series = SERIES["series"][:2, :4].numpy()
    assert (loaded.run({"series": series, "length": np.array([4, 2])})["output"] == series[[0, 1], [3, 1]]).all()
    for length in (5, 2**30):
        with pytest.raises(BadInput):
            loaded.run({"series": series, "length": np.array([length, 2])})


def test_a_model_of_one_size_of_a_named_dimension_is_refused(tmp_path: Path) -> None:
    """With the size that it cannot answer, and what to do."""

    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(len(x), 2, 3)

    with pytest.raises(BadArtifact, match="cut to time 3") as raised:
        export_module(Fixed(), torch.randn(8, 6), tmp_path / "m", About(dynamic={"x": {1: "time"}}))
    assert "dimensions that vary" in str(raised.value.remedy)


def test_code_that_fixes_a_size_is_named(tmp_path: Path) -> None:
    """With the input and its dimension, in place of the tracer's words for them."""

    class Counting(nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return first * second[torch.arange(len(second))]

    with pytest.raises(Untraceable, match=r"fixes dimension 0 of '(first|second)' at 3") as raised:
        export_module(Counting(), {"first": torch.randn(8, 4), "second": torch.randn(8, 4)}, tmp_path / "m")
    assert ".shape[0]" in str(raised.value.remedy)


def test_another_number_of_labels_is_refused(tmp_path: Path) -> None:
    """A service would name classes by a list that is not theirs."""
    about = About(labels={"output": ["cat", "dog", "bird"]})
    with pytest.raises(BadArtifact, match="has 2 values a sample, and there are 3 labels"):
        export_module(nn.Linear(4, 2).eval(), torch.randn(8, 4), tmp_path / "m", about)


def test_weights_of_16_bits_that_no_engine_repeats_are_named(tmp_path: Path) -> None:
    """The cause is no size in `forward`, and the remedy another."""

    class Rounded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.bfloat16()).float()

    torch.manual_seed(0)
    with pytest.raises(BadArtifact, match="does not compute what the model does") as raised:
        export_module(Rounded(64, 8).bfloat16().eval(), torch.randn(8, 64), tmp_path / "m", About(limit=1e-6))
    assert "export module.float()" in str(raised.value.remedy)
