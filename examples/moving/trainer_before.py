"""A small Llama learns Python, by Hugging Face's Trainer: `python trainer_before.py`. After: trainer_after.py."""

from __future__ import annotations

from typing import Any

import torch
from material import llama, source
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments


def arguments(epochs: int, **others: Any) -> TrainingArguments:
    """Two micro-batches of 16 an update; warm-up and a cosine; stops early, keeps the best."""
    settings: dict[str, Any] = {
        "output_dir": "runs/llama",
        "num_train_epochs": epochs,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "max_grad_norm": 1.0,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "logging_steps": 10,
        "seed": 0,
    }
    return TrainingArguments(**{**settings, **others})


def rows(tokens: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Samples as the Trainer wants them; the model shifts the labels itself."""
    return [{"input_ids": row, "labels": row} for row in tokens]


if __name__ == "__main__":
    tokens = source()
    stopping = EarlyStoppingCallback(early_stopping_patience=3)
    trainer = Trainer(
        llama(),
        arguments(epochs=5),
        train_dataset=rows(tokens[:1280]),
        eval_dataset=rows(tokens[1280:]),
        callbacks=[stopping],
    )
    trainer.train()
