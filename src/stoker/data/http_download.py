"""Downloads of one file over HTTP, limited in time and size. Imported only for a download: urllib loads slowly."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request

from stoker.units import format_bytes

_CHUNK_BYTES = 2**18


def fetch(url: str, *, at_most_bytes: int, silence_s: float, total_s: float) -> bytes:
    """The content of `url`. The operating system's host name lookup may outlast `silence_s`.

    Args:
        url: where the file is; a scheme that urllib knows.
        at_most_bytes: more than this is an error.
        silence_s: longest pause of the server [s].
        total_s: longest duration of the whole [s].

    Raises:
        OSError: the file is missing, the server does not answer, sends too much, or is too slow; the text says which.
    """
    try:
        deadline_s = time.monotonic() + total_s
        content = bytearray()
        with urllib.request.urlopen(url, timeout=silence_s) as response:  # noqa: S310 - the URL is written in Stoker
            while chunk := response.read1(_CHUNK_BYTES):
                content += chunk
                if len(content) > at_most_bytes:
                    raise OSError(f"more than {format_bytes(at_most_bytes)}, which is more than the file has")
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"only {format_bytes(len(content))} within {total_s:g} s")
        announced = response.headers.get("Content-Length")  # `read1` does not report an early end
        if announced is not None and announced.isdigit() and int(announced) != len(content):
            raise OSError(f"{len(content):,} of {int(announced):,} bytes, then broke off")
        return bytes(content)
    except urllib.error.HTTPError as problem:
        problem.close()
        raise OSError(f"HTTP status {problem.code} ({problem.reason})") from problem
    except urllib.error.URLError as problem:
        raise OSError(f"no answer ({problem.reason})") from problem
    except http.client.HTTPException as problem:
        raise OSError(f"an answer broken off ({problem})") from problem
