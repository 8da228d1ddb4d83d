"""Low-rank adapters by peft: the base is frozen, the adapters are trained, and what a run keeps is the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import stoker
from stoker.stepping.model import build_model
from stoker.stepping.step import Step
from tests.models.loops import UPDATES, largest_gap, ours, theirs
from tests.optional import optional
from tests.stepping.driving import SEPARABLE, plan_of, train

transformers, peft = optional("transformers"), optional("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""peft 0.21 asks transformers 5 by its old name."""

VOCAB, TOKENS, LABELS = 19, 8, 3
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": TOKENS,
    "num_labels": LABELS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def adapted() -> Any:
    """A classifier whose attention has adapters of rank 4."""
    base = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.0)
    return peft.get_peft_model(base, settings)


def job_of(**changed: Any) -> stoker.Job:
    """A classifier of texts."""
    tokens = torch.randint(1, VOCAB, (48, TOKENS), generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {
        "model": adapted,
        "data": {"input_ids": tokens, "labels": tokens[:, 0] % LABELS},
        "loss": "own",
        "batch": 12,
        "optimizer": stoker.AdamW(lr=1e-2, weight_decay=0.0),
        "until": stoker.updates(UPDATES),
    }
    return stoker.Job(**{**given, **changed})


@pytest.mark.slow
def test_adapters_learn_as_in_a_plain_loop_and_the_base_stays() -> None:
    """To 1e-5 over 50 updates; what is frozen has neither gradient nor state, and does not move by a bit."""
    job = job_of()
    expected = theirs(
        job,
        lambda model, batch: model(**batch).loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0),
    )
    assert largest_gap(ours(job), expected) < 1e-5
    step = Step(job, plan_of(12), SEPARABLE)
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    train(job, step, 3)
    moved = {name for name, p in step.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in step.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "classifier" in name for name in moved)
    assert len(step.optimizer.state) == len(moved)


def test_adapters_are_written_alone_and_merged(tmp_path: Path) -> None:
    """`run.model()` is the whole; its adapters go to a safetensors file of their own, or into the base's weights."""
    run = stoker.train(
        job_of(until=stoker.updates(5)), run_dir=tmp_path / "run", plan=plan_of(12), sink=lambda event: None
    )
    model: Any = run.model()
    model.save_pretrained(tmp_path / "adapter")
    adapter = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(one.numel() for one in adapter.values()) < sum(p.numel() for p in model.parameters()) / 3
    data = {name: tensor[:4] for name, tensor in job_of().data.items()}
    with torch.no_grad():
        expected = model(**data).logits
        assert torch.allclose(model.merge_and_unload()(**data).logits, expected, atol=1e-5)


@pytest.mark.slow
def test_an_export_has_the_adapters_merged(tmp_path: Path) -> None:
    """The graph is the base's, with no product more; its answers are those of the adapted model."""
    run = stoker.train(
        job_of(until=stoker.updates(5)), run_dir=tmp_path / "run", plan=plan_of(12), sink=lambda event: None
    )
    artifact = stoker.export(run, tmp_path / "models" / "adapted")
    weights = safetensors.torch.load_file(artifact.path / "model.safetensors")
    assert not [name for name in weights if "lora_" in name]


def test_initial_weights_of_adapters_are_drawn_by_the_jobs_seed() -> None:
    """However the process was seeded."""
    torch.manual_seed(1)
    first = build_model(job_of()).state_dict()
    torch.manual_seed(2)
    assert all(torch.equal(tensor, first[name]) for name, tensor in build_model(job_of()).state_dict().items())
