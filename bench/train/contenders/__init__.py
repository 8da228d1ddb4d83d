"""Everybody who takes part, each in a file of its own with a function `run` that trains until it is stopped."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.train.material import Material
from bench.train.pacing import Pacer

Group = Literal["bf16", "default", "by_hand", "stoker"]
"""Trainers with their bf16 on, trainers as they come, loops written by hand, and Stoker."""


@dataclass(frozen=True)
class Contender:
    """Who takes part: the module that trains, its settings, what must be installed, what it needs in its environment.

    `is_fp32` says whether its losses must be everybody's to rounding, `is_other_form` that its updates are the same in
    another form.
    """

    name: str
    title: str
    group: Group
    module: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    requires: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    is_fp32: bool = True
    is_other_form: bool = False

    def missing(self) -> list[str]:
        """Packages it needs that are not installed."""
        return [name for name in self.requires if not _is_installed(name)]

    def versions(self) -> dict[str, str]:
        """Versions of the packages it needs, where they are installed."""
        return {name: importlib.metadata.version(name) for name in self.requires if _is_installed(name)}

    def run(self, material: Material, pacer: Pacer) -> None:
        """Train until the pacer ends the process."""
        module = importlib.import_module(f"bench.train.contenders.{self.module}")
        module.run(material, pacer, **self.settings)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


_TRAINERS = (
    ("lightning", "Lightning", "with_lightning", ("lightning",)),
    ("accelerate", "Accelerate", "with_accelerate", ("accelerate",)),
    ("hf_trainer", "HF Trainer", "with_hf_trainer", ("transformers", "accelerate")),
)

_CONTENDERS: tuple[Contender, ...] = (
    *(
        Contender(f"{name}_bf16", f"{title} (bf16)", "bf16", module, {"bf16": True}, requires, is_fp32=False)
        for name, title, module, requires in _TRAINERS
    ),
    *(
        Contender(f"{name}", f"{title} (as it comes)", "default", module, {"bf16": False}, requires)
        for name, title, module, requires in _TRAINERS
    ),
    *(
        Contender(
            f"keras_{backend}",
            f"Keras 3 on {title} (as it comes)",
            "default",
            "with_keras",
            {},
            ("keras", backend),
            {"KERAS_BACKEND": backend},
            is_other_form=True,
        )
        for backend, title in (("torch", "PyTorch"), ("jax", "JAX"))
    ),
    Contender("plain", "a plain PyTorch loop, fp32", "by_hand", "by_hand", {"is_tuned": False}),
    Contender("by_hand", "a loop tuned by hand", "by_hand", "by_hand", {"is_tuned": True}, is_fp32=False),
    Contender("stoker", "Stoker", "stoker", "with_stoker", is_fp32=False),
)

CONTENDERS: dict[str, Contender] = {one.name: one for one in _CONTENDERS}
"""Contenders by name, in the order of their turns."""
