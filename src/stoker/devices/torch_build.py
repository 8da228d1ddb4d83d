"""Which PyTorch is installed, without importing it: its version, and whether it was built for CUDA."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """An installed PyTorch: its version, and the CUDA release it was built for (None for a build without CUDA)."""

    version: str
    cuda: str | None

    def __str__(self) -> str:
        """As people write it: `2.13.0+cpu (no CUDA)`."""
        return f"{self.version} ({f'CUDA {self.cuda}' if self.cuda else 'no CUDA'})"


def installed_torch() -> TorchBuild | None:
    """The PyTorch an `import torch` would load; None where there is none that can be read."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return parse_torch_version(Path(spec.origin).with_name("version.py").read_text())
    except OSError:
        return None


def parse_torch_version(text: str) -> TorchBuild | None:
    r"""The build told by the text of PyTorch's own `torch/version.py`; None if it tells no version.

    >>> parse_torch_version("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'")
    TorchBuild(version='2.13.0+cu130', cuda='13.0')
    """
    version = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return TorchBuild(version.group(1), cuda.group(1) if cuda else None) if version else None
