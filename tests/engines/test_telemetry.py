"""Usage is not reported to anyone."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CODE = """
import sys
import stoker.engines.openvino
from stoker.compressing import openvino_candidates as quantisers

quantisers._loaded("nncf")
sent = [name for name in sys.modules if name.startswith("openvino_telemetry.")]
assert not sent, sent
"""


@pytest.mark.slow
def test_openvino_and_nncf_are_loaded_without_the_package_that_sends() -> None:
    """Neither an engine nor a quantiser loads what reports their use to their makers."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
