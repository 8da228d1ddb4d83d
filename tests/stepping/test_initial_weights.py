from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs.initial_weights import Weights
from stoker.stepping.model import build_model, weights_digest
from tests.stepping.models import make_job


def body_and_head(classes: int = 3) -> nn.Module:
    """A layer with a batch norm under `body`, and a head."""
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "head": nn.Linear(4, classes)})


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Weights of the same model, drawn otherwise."""
    torch.manual_seed(123)
    return body_and_head().state_dict()


@pytest.fixture
def file(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    """The same in a file."""
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_file_a_folder_and_tensors_lead_to_the_same_weights(file: Path, state: dict[str, torch.Tensor]) -> None:
    """Bit for bit, buffers included; and the digest in a job's spec is that of these weights."""
    digests = {weights_digest(build_model(make_job(body_and_head, init=one))) for one in (file, file.parent, state)}
    expected = body_and_head()
    expected.load_state_dict(state)
    assert digests == {weights_digest(expected)}
    assert digests != {weights_digest(build_model(make_job(body_and_head)))}


def test_a_model_in_several_files_is_put_together(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    """As large models come."""
    names = sorted(state)
    for number, part in enumerate((names[:3], names[3:])):
        safetensors.torch.save_file({name: state[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    model = build_model(make_job(body_and_head, init=tmp_path))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_fresh_head_stays_as_it_was_made(file: Path) -> None:
    """Also where it is of another shape, or the source has one of the same."""
    drawn = build_model(make_job(lambda: body_and_head(7)))
    model = build_model(make_job(lambda: body_and_head(7), init=Weights(file, fresh=("head.*",))))
    assert torch.equal(model["head"].weight, drawn["head"].weight)  # type: ignore[index]
    assert not torch.equal(model["body"][0].weight, drawn["body"][0].weight)  # type: ignore[index]


def test_prefixes_are_taken_off_and_what_is_unused_is_left(state: dict[str, torch.Tensor]) -> None:
    """A model within a larger one's weights."""
    whole = {f"net.{name}": tensor for name, tensor in state.items()} | {"pooler.weight": torch.zeros(2)}
    model = build_model(make_job(body_and_head, init=Weights(whole, unused=("pooler.*",), prefix="net.")))
    assert torch.equal(model.state_dict()["head.weight"], state["head.weight"])


def tied() -> nn.Module:
    """One tensor under two names."""
    model = nn.ModuleDict({"tokens": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["tokens"].weight
    return model


def test_a_tied_weight_need_be_there_once() -> None:
    """As safetensors keeps it."""
    model = build_model(make_job(tied, init={"tokens.weight": torch.ones(5, 4)}))
    assert model["head"].weight is model["tokens"].weight  # type: ignore[index]
    assert model["head"].weight.eq(1).all()  # type: ignore[index]


def test_one_of_two_weights_for_a_tied_one_has_to_be_chosen() -> None:
    """Else the last one that was copied would win; equal ones are no question."""
    untied = {"tokens.weight": torch.ones(5, 4), "head.weight": torch.zeros(5, 4)}
    with pytest.raises(BadJob, match=r"tokens\.weight and head\.weight are one tensor in the model") as caught:
        build_model(make_job(tied, init=untied))
    assert "unused=('head.weight',)" in (caught.value.remedy or "")
    model = build_model(make_job(tied, init=Weights(untied, unused=("head.weight",))))
    assert model["head"].weight.eq(1).all()  # type: ignore[index]
    build_model(make_job(tied, init={name: torch.ones(5, 4) for name in untied}))


def test_what_is_unused_is_not_taken_where_it_would_fit(state: dict[str, torch.Tensor]) -> None:
    """The model's own stays if it may, and is missed otherwise."""
    with pytest.raises(BadJob, match=r"head\.weight \[3, 4\], head\.bias \[3\] of ModuleDict are not in its initial"):
        build_model(make_job(body_and_head, init=Weights(state, unused=("head.*",))))
    drawn = build_model(make_job(body_and_head))
    model = build_model(make_job(body_and_head, init=Weights(state, unused=("head.*",), fresh=("head.*",))))
    assert torch.equal(model["head"].weight, drawn["head"].weight)  # type: ignore[index]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    """In two files of a folder, such as a model in two precisions; or once a prefix is taken off."""
    for name in ("model", "model.fp16"):
        safetensors.torch.save_file(state, tmp_path / f"{name}.safetensors")
    with pytest.raises(BadJob, match=r"model\.safetensors and another file in its folder both contain body\.0\.bias"):
        build_model(make_job(body_and_head, init=tmp_path))
    with pytest.raises(BadJob, match=r"both net\.head\.bias and head\.bias"):
        build_model(make_job(body_and_head, init=Weights({**state, "net.head.bias": torch.zeros(3)}, prefix="net.")))


@pytest.mark.parametrize(
    ("change", "settings", "problem"),
    [
        ({"head.weight": None}, {}, r"head\.weight \[3, 4\] of ModuleDict are not in its initial weights"),
        ({"more": torch.zeros(1)}, {}, "more in the initial weights have no place in ModuleDict"),
        ({"head.weight": torch.zeros(7, 4)}, {}, r"head\.weight \[7, 4\] for \[3, 4\] .* of another shape"),
        ({}, {"fresh": ("tail.*",)}, r"fresh=….*'tail\.\*' matches none"),
        ({}, {"unused": ("tail.*",)}, r"unused=….*'tail\.\*' matches none"),
        ({"more": 3}, {}, "'more' is a int"),
    ],
)
def test_what_is_not_made_for_the_model_is_named(state, change, settings, problem) -> None:
    """Missing, left over, of another shape: with names and shapes, before anything is spent."""
    source = {name: one for name, one in {**state, **change}.items() if one is not None}
    with pytest.raises(BadJob, match=problem):
        build_model(make_job(body_and_head, init=Weights(source, **settings)))


def test_files_that_are_not_there_or_not_safetensors_are_named(tmp_path: Path) -> None:
    """A missing file, an empty folder, another kind of content."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    for path, problem in (
        ("none.safetensors", "is not there"),
        ("empty", "no safetensors file in it"),
        ("broken.safetensors", "cannot be read as safetensors"),
    ):
        with pytest.raises(BadJob, match=problem):
            build_model(make_job(body_and_head, init=tmp_path / path))
