"""HTML from values: everything is escaped on its way in, and the type `Markup` says what has been."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NewType

Markup = NewType("Markup", str)
"""Text that is HTML already. A plain `str` is not, so that mypy finds what was not escaped."""


def escaped(value: object) -> Markup:
    """A value as text that can stand in an element or a quoted attribute."""
    return Markup(html.escape(str(value), quote=True))


def joined(parts: Iterable[Markup], separator: str = "") -> Markup:
    """Pieces of HTML one after another; `separator` is escaped."""
    return Markup(escaped(separator).join(parts))


def element(tag: str, *content: Markup, css: str = "", **attributes: str) -> Markup:
    """An element with its content; attribute names with `_` become `-`, attribute values are escaped."""
    named = ({"class": css} if css else {}) | {key.rstrip("_").replace("_", "-"): v for key, v in attributes.items()}
    inside = "".join(f' {name}="{escaped(value)}"' for name, value in named.items())
    return Markup(f"<{tag}{inside}>{''.join(content)}</{tag}>")


def section(title: str, *content: Markup, css: str = "") -> Markup:
    """A titled part of the page."""
    return element("section", element("h2", escaped(title)), *content, css=css)


def facts(rows: Iterable[tuple[str, Markup]]) -> Markup:
    """A list of terms and what they are; rows without content are left out."""
    pairs = (element("div", element("dt", escaped(term)), element("dd", value)) for term, value in rows if value)
    return element("dl", *pairs, css="facts")


def table(head: Sequence[str], rows: Iterable[Sequence[Markup]], *, css: str = "") -> Markup:
    """A table that scrolls sideways on a narrow screen and names each cell's column for one that stacks it."""
    heads = joined(element("th", escaped(title), scope="col") for title in head)
    body = joined(
        element("tr", *(element("td", cell, data_label=title) for title, cell in zip(head, row, strict=True)))
        for row in rows
    )
    whole = element("table", element("thead", element("tr", heads)), element("tbody", body))
    return element("div", whole, css=f"scroll {css}".strip())


def script_json(text: str) -> Markup:
    """JSON text that can stand inside a script element, whatever its strings hold."""
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
