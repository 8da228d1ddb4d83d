"""Why a column that somebody names is not in a table's header: another delimiter, or spaces."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.errors import nearest

_OTHER_DELIMITERS = {";": "';'", "\t": "'\\t' (tabs)", "|": "'|'", ",": "','"}


def no_such_column(column: str, header: Sequence[str]) -> tuple[str, str]:
    r"""What to say of it, and what to do.

    >>> no_such_column("y", ["a;y"])
    ("Its header is one column, 'a;y'.", "If ';' is between fields, give delimiter=';'.")
    >>> no_such_column("y", ["a", " y"])
    ("Its header has spaces around names: ' y'.", 'Take them out of the file, or name the column with them.')
    >>> no_such_column("wide", ["a", "y"])
    ('Known: a, y.', 'Mend the name where the source is made.')
    """
    if len(header) == 1:
        for delimiter, shown in _OTHER_DELIMITERS.items():
            if column in [name.strip() for name in header[0].split(delimiter)]:
                remedy = f"If {shown} is between fields, give delimiter={shown.partition(' ')[0]}."
                return f"Its header is one column, {header[0]!r}.", remedy
    spaced = next((name for name in header if name.strip() == column.strip()), None)
    if spaced is not None:
        words = f"Its header has spaces around names: {spaced!r}."
        return words, "Take them out of the file, or name the column with them."
    return nearest(column, header), "Mend the name where the source is made."
