from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

import stoker.predicting
from stoker.errors import BadJob


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyArrow the command says what to install, instead of a traceback."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else object())
    with pytest.raises(BadJob, match="pyarrow is not installed") as caught:
        importlib.reload(stoker.predicting)
    assert "stoker[predict]" in str(caught.value)


def test_predicting_never_loads_torch() -> None:
    """Answering rows needs an engine, not the library that the model was trained with."""
    code = "import sys, stoker.predicting.prediction; print(sorted({'torch', 'onnx', 'plotly'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
