"""Signals are still handled after models have come and gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CODE = """
import faulthandler, signal, sys
from pathlib import Path

faulthandler.enable()  # has a stack for signals
from stoker.artifacts import read
from stoker.engines import load_graph, Graph
from stoker.testing.tiny_models import tiny_artifact

artifact = tiny_artifact(Path(sys.argv[1]))
manifest = artifact.manifest
graph = Graph(path=artifact.graph_path, precision="fp32", inputs=manifest.inputs, outputs=manifest.outputs)
first, = load_graph("openvino", graph)
second, = load_graph("openvino", graph)
first.close()
del first
second.close()
del second
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
signal.raise_signal(signal.SIGTERM)
"""


def test_a_signal_is_handled_after_models_went_in_the_order_they_came(tmp_path: Path) -> None:
    """OpenVINO would leave a stack that is no more, and the signal would end the process."""
    command = [sys.executable, "-W", "ignore", "-c", _CODE, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
