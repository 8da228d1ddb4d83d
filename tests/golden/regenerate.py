"""Write the golden curves again: only when what Stoker computes is meant to change.

python -m tests.golden.regenerate
"""

from __future__ import annotations

import json

import torch

from tests.golden.curves import CURVES, FILE, losses


def main() -> None:
    """Compute every curve on one thread and write it; json writes floats so that they read back exactly."""
    torch.set_num_threads(1)
    curves = {name: losses(name) for name in CURVES}
    FILE.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    for name, curve in curves.items():
        print(f"{name}: {len(curve)} losses from {curve[0]:.4f} to {curve[-1]:.4f}")


if __name__ == "__main__":
    main()
