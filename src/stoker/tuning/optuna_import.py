"""Optuna, which keeps studies, proposes configurations and prunes trials: `pip install 'stoker[tune]'`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.errors import BadJob


def require_optuna(sampler: str = "") -> None:
    """See that Optuna is installed, and what the sampler needs beyond it; quieten its own log.

    Raises:
        BadJob: it is not; the extra that brings it is named.
    """
    for name in ("optuna", *(("scipy", "torch") if sampler == "gp" else ())):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise BadJob(
                f"tuning needs {name}, which is not installed here", remedy="pip install 'stoker[tune]'"
            ) from error
    import optuna  # noqa: PLC0415 - known to be there only now

    optuna.logging.set_verbosity(optuna.logging.ERROR)


@contextmanager
def without_experimental_warnings() -> Iterator[None]:
    """Within the block, Optuna does not warn of what it calls experimental: its version is told in the record."""
    from optuna.exceptions import ExperimentalWarning  # noqa: PLC0415 - known to be there only when tuning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield
