"""The process of one target: `python -m bench.fuzz.child TARGET` with libFuzzer's own arguments; it ends with it."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["stoker", "tarfile", "uvicorn"]):
    from bench.fuzz.targets import targets


def main() -> None:
    """Fuzz until libFuzzer is done."""
    chosen = targets()[sys.argv.pop(1)]
    atheris.Setup(sys.argv, chosen)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
