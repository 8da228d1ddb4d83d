"""Compiles the pool's contract: `python -m tests.pool.contract_compiler` writes `escrow.json` next to its source."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import stoker.pool

SOURCE = Path(stoker.pool.__file__).parent / "contract" / "escrow.vy"
COMPILED = SOURCE.with_suffix(".json")


def compiled() -> dict[str, Any]:
    """What the compiler makes of the source; needs `pip install vyper==0.4.3`."""
    import vyper

    text = SOURCE.read_text()
    made = vyper.compile_code(text, output_formats=["abi", "bytecode", "bytecode_runtime"])
    return {
        "compiler": f"vyper {vyper.__version__}",
        "source_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "abi": made["abi"],
        "bytecode": made["bytecode"],
        "runtime": made["bytecode_runtime"],
    }


if __name__ == "__main__":
    COMPILED.write_text(json.dumps(compiled(), indent=1) + "\n")
