"""What models of other libraries return, recognised by its form alone: none of them is needed."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Loss
from stoker.jobs.fields import Fields
from stoker.stepping.foreign_models import (
    OwnLoss,
    adopt_model,
    in_full_precision,
    merge_adapters,
    num_labels,
    scores,
    shifts_labels,
)

LOGITS = torch.zeros(2, 3)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Output(OrderedDict[str, Any]):
    """A dict whose entries are attributes as well, as the outputs of transformers are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def model_of(kind: str | None, **config: Any) -> Any:
    """What identifies the loss of a Hugging Face model."""
    return SimpleNamespace(config=SimpleNamespace(**config), loss_type=kind, loss_function=None)


@pytest.mark.parametrize("output", [LOGITS, {"logits": LOGITS}, SimpleNamespace(logits=LOGITS), Output(logits=LOGITS)])
def test_the_logits_are_found(output: Any) -> None:
    """The tensor itself, an entry, or an attribute."""
    assert scores(output) is LOGITS


@pytest.mark.parametrize("output", [(LOGITS, LOGITS), {"a": LOGITS}, SimpleNamespace(logits=None)])
def test_other_outputs_stay_as_they_are(output: Any) -> None:
    """Nothing says which of several tensors is meant."""
    assert scores(output) is output


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_and_types_stay(half: torch.dtype) -> None:
    """In tensors, tuples, named tuples, dicts and objects with entries; what is wide already is not copied."""
    narrow = LOGITS.to(half)
    for output in (narrow, (narrow, 1), [narrow], {"a": narrow}, Pair(narrow, narrow), Output(logits=narrow)):
        found = in_full_precision(output)
        assert type(found) is type(output)
        first = (
            found
            if isinstance(found, torch.Tensor)
            else next(iter(found.values() if isinstance(found, dict) else found))
        )
        assert first.dtype == torch.float32
    wide = Output(logits=LOGITS)
    assert in_full_precision(wide) is wide


@pytest.mark.parametrize(
    ("kind", "config", "shifts"),
    [
        ("ForCausalLM", {}, True),
        (None, {}, True),  # what such a model falls back to
        ("ForConditionalGeneration", {"is_encoder_decoder": False}, True),
        ("ForConditionalGeneration", {"is_encoder_decoder": True}, False),
        ("ForMaskedLM", {}, False),
        ("ForSequenceClassification", {}, False),
    ],
)
def test_causal_models_shift_their_labels(kind: str | None, config: dict[str, Any], *, shifts: bool) -> None:
    """And count one less of each sample."""
    model = model_of(kind, **config)
    labels = torch.tensor([[1, 2, -100], [1, -100, -100]])
    assert shifts_labels(model) is shifts
    assert int(num_labels(model, labels)) == (1 if shifts else 3)
    assert num_labels(model, torch.zeros(2, 3)) == 6
    assert int(num_labels(model, torch.tensor([1, -100]))) == 1


def test_a_plain_module_shifts_nothing() -> None:
    """Whatever it is called."""
    assert not shifts_labels(nn.Linear(2, 2))


def test_its_own_loss_is_its_mean_times_the_number_of_labels() -> None:
    """Without labels the mean alone: whether it adds up is for the probe to find."""
    own, mean = OwnLoss(Fields()), torch.tensor(0.5)
    found = own.of(model_of("ForMaskedLM"), {"loss": mean}, {"labels": torch.tensor([[1, 2, -100]])})
    assert isinstance(found, Loss)
    assert (float(found.sum), int(found.count)) == (1.0, 2)
    assert own.of(nn.Linear(1, 1), SimpleNamespace(loss=mean), {"x": LOGITS}) is mean
    with pytest.raises(BadJob, match=r"this one returned a tensor \[2, 3\]: no scalar"):
        own.of(nn.Linear(1, 1), LOGITS, {})


def test_a_batch_without_any_label_adds_nothing_to_its_own_loss() -> None:
    """The mean of no label is nan; cut out of a larger batch, such samples change neither its loss nor its gradient."""
    logits = LOGITS.clone().requires_grad_()
    labels = torch.full(logits.shape[:-1], -100)
    mean = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    found = OwnLoss(Fields()).of(model_of("ForMaskedLM"), {"loss": mean}, {"labels": labels})
    assert mean.isnan()
    assert isinstance(found, Loss)
    assert isinstance(found.sum, torch.Tensor)
    assert (float(found.sum.detach()), float(found.count)) == (0.0, 0.0)
    found.sum.backward()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("fields", "names"),
    [(Fields(), {"a", "b", "labels"}), (Fields("a", "labels"), {"a", "labels"}), (Fields(["a", "b"]), {"a", "b"})],
)
def test_a_model_with_its_own_loss_is_given_the_entries_asked_for(fields: Fields, names: set[str]) -> None:
    """All of them by default, the target among them."""
    content = {"a": LOGITS, "b": LOGITS, "labels": LOGITS}
    assert set(OwnLoss(fields).call(lambda **given: given, content)) == names


def test_the_cache_for_generating_is_off_while_training() -> None:
    """In the configuration of the model that is trained; others have none."""
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    assert adopt_model(model) is model
    assert model.config.use_cache is False
    plain = nn.Linear(1, 1)
    assert adopt_model(plain) is plain


def test_adapters_are_merged_where_there_are_any() -> None:
    """By the model's own function for it."""

    class Adapted(nn.Linear):
        def merge_and_unload(self) -> nn.Module:
            return nn.Identity()

    plain = nn.Linear(1, 1)
    assert merge_adapters(plain) is plain
    assert isinstance(merge_adapters(Adapted(1, 1)), nn.Identity)
