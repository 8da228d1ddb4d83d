"""OpenVINO and NNCF report their use to their makers, over the network; not from a process of Stoker's user."""

from __future__ import annotations

import sys
from typing import Any


def withhold() -> None:
    """Let OpenVINO and NNCF, imported next, go without the package that sends; they do so wherever it is absent.

    Without effect on what was imported before.
    """
    modules: dict[str, Any] = sys.modules  # None stands for a package that cannot be imported
    modules.setdefault("openvino_telemetry", None)
