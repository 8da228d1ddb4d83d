"""The command `stoker`, and `python -m stoker`; Ctrl-C ends it quietly also while all else is imported."""

from __future__ import annotations

import importlib
import sys

_INTERRUPTED = 130
"""The exit code of `stoker.cli.terminal.INTERRUPTED`, before that is imported."""


def main() -> None:
    """Run the command line."""
    try:
        importlib.import_module("stoker.cli.main").main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
