"""How many bad rows a job bears."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import BadJob


@dataclass(frozen=True)
class MostBad:
    """A number of rows, or a share of all."""

    rows: int | None = None
    share: float | None = None

    def rows_of(self, num_rows: int) -> int:
        """The most bad rows among `num_rows`."""
        return self.rows if self.rows is not None else int((self.share or 0.0) * num_rows)

    def __str__(self) -> str:
        """As it is written on the command line."""
        return str(self.rows) if self.rows is not None else f"{100 * (self.share or 0.0):g}%"


def parse_most_bad(text: str) -> MostBad:
    """What `--max-bad` says: `1%` of the rows, or `100` of them.

    Raises:
        BadJob: it says something else.

    >>> parse_most_bad("1%").rows_of(12_345), parse_most_bad("7").rows_of(12_345)
    (123, 7)
    """
    problem = BadJob(f"--max-bad {text} is not understood", remedy="Give a share such as 1%, or a number of rows.")
    number = text.removesuffix("%")
    try:
        found = MostBad(rows=int(number)) if number == text else MostBad(share=float(number) / 100)
    except ValueError:
        raise problem from None
    if (found.rows or 0) < 0 or not 0 <= (found.share or 0.0) <= 1:
        raise problem
    return found
