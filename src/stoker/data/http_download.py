"""Fetching one file over HTTP within a time and a size; imported when something is downloaded, for what it loads."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request

from stoker.units import format_bytes

_CHUNK_BYTES = 2**18


def fetch(url: str, *, at_most_bytes: int, silence_s: float, total_s: float) -> bytes:
    """What `url` sends.

    Looking up the host's name is the operating system's affair, and may outlast `silence_s`.

    Args:
        url: where the file is; a scheme that urllib knows.
        at_most_bytes: more than this is an error.
        silence_s: how long the server may send nothing [s].
        total_s: how long the whole may take [s].

    Raises:
        OSError: there is no such file, no answer, too much of it, or not in time; its text says which.
    """
    try:
        return _read(url, at_most_bytes, silence_s, total_s)
    except urllib.error.HTTPError as problem:
        problem.close()
        raise OSError(f"HTTP status {problem.code} ({problem.reason})") from problem
    except urllib.error.URLError as problem:
        raise OSError(f"no answer ({problem.reason})") from problem
    except http.client.HTTPException as problem:
        raise OSError(f"an answer broken off ({problem})") from problem


def _read(url: str, at_most_bytes: int, silence_s: float, total_s: float) -> bytes:
    deadline_s = time.monotonic() + total_s
    content = bytearray()
    with urllib.request.urlopen(url, timeout=silence_s) as response:  # noqa: S310 - the URL is written in Stoker
        while chunk := response.read1(_CHUNK_BYTES):
            content += chunk
            if len(content) > at_most_bytes:
                raise OSError(f"more than {format_bytes(at_most_bytes)}, which is more than the file has")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"only {format_bytes(len(content))} within {total_s:g} s")
    _require_whole(response, len(content))
    return bytes(content)


def _require_whole(response: http.client.HTTPResponse, num_bytes: int) -> None:
    """Raise OSError if the connection ended before the length that was announced (`read1` does not tell)."""
    announced = response.headers.get("Content-Length")
    if announced is not None and announced.isdigit() and int(announced) != num_bytes:
        raise OSError(f"{num_bytes:,} of {int(announced):,} bytes, then broke off")
