"""Libraries that only some data need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stoker.errors import BadJob


@contextmanager
def needs(package: str, extra: str = "data") -> Iterator[None]:
    """Say how to install `package` if what is imported within is missing.

    Raises:
        BadJob: it is.
    """
    try:
        yield
    except ImportError as error:
        raise BadJob(f"{package} is not installed ({error})", remedy=f"pip install 'stoker[{extra}]'") from error
