"""The process of one target: `python -m bench.fuzz.child TARGET` with libFuzzer's own arguments; it ends with it."""

from __future__ import annotations

import sys

import atheris

PACKAGES = ["stoker", "bench.fuzz", "tarfile", "uvicorn"]


def main() -> None:
    """Fuzz until libFuzzer is done."""
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=PACKAGES):
        from bench.fuzz.targets import seeds_of, targets  # noqa: PLC0415 - instrumented as it is imported

        target = targets()[name]
        for path in seeds_of(name):  # so that what is imported on first use is instrumented as well
            target(path.read_bytes())
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
