"""Pages from templates: the Jinja environment and the content security policy.

A template escapes every value on its way in; only `Markup` is HTML already.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from stoker import units
from stoker.records.codec import JSON
from stoker.reporting import event_text, wording
from stoker.reporting.colours import colour_sheet

if TYPE_CHECKING:
    import jinja2


@functools.cache
def resource(name: str) -> Markup:
    """The text of a style sheet or script of this package, which stands in a page as it is."""
    return Markup(resources.files("stoker.reporting").joinpath("static", name).read_text(encoding="utf-8"))  # noqa: S704 - ours


@functools.cache
def _environment() -> jinja2.Environment:
    """Made at the first page: importing Jinja and compiling templates takes longer than a command's start may."""
    import jinja2  # noqa: PLC0415 - a run needs it at its end alone

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("stoker.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"colour_sheet": colour_sheet, "resource": resource}
    environment.filters |= {
        "bytes": units.format_bytes,
        "coded": coded,
        "described": event_text.describe_event,
        "interval": wording.format_interval,
        "percent": lambda fraction, digits=0: f"{100 * fraction:.{digits}f} %",
        "quantity": wording.format_quantity,
        "samples": wording.format_samples,
        "seconds": units.format_seconds,
        "spread": wording.format_spread,
    }
    return environment


def coded(text: object) -> Markup:
    """Running text as HTML: what stands between backticks is code.

    >>> coded("`stoker runs` lists <all>")
    Markup('<code>stoker runs</code> lists &lt;all&gt;')
    """
    parts = re.split(r"`([^`]+)`", str(text))
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(part) if index % 2 else escape(part) for index, part in enumerate(parts))


def render(template: str, **values: object) -> str:
    """HTML of a template in `templates/`, given what it shows; a name that it uses and is not given is an error."""
    return _environment().get_template(f"{template}.html.j2").render(values)


def render_with_scripts(
    template: str, scripts: Sequence[Markup], data: str, values: Mapping[str, object], *, more_policy: str = ""
) -> str:
    """A page of `values`, scripts and the JSON text that they read, whose policy lets nothing else run or be loaded.

    `more_policy` is what the page forbids itself beyond that. The policy names the SHA-256 of each script. Source: W3C,
    Content Security Policy Level 3, section 6.7.3, "Does element match source list for type and source?".
    """
    policy = _policy(tuple(scripts), more_policy)
    return render(template, policy=policy, scripts=scripts, data=script_json(data), **values)


@functools.cache
def _policy(scripts: tuple[Markup, ...], more: str) -> str:
    """The content security policy of a page: it runs these scripts alone, and draws with its own styles and images."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"base-uri 'none'; form-action 'none'{more}"
    )


_EXPORTED = re.compile(r"^export (?:const|class) (\w+)", re.MULTILINE)
_MODULE_SYNTAX = [
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"^export \{ (\w+) as default \};", r"return \1;"),
        (r"^export ", ""),
        (r'^import \* as (\w+) from "\./(.+)";', r'const \1 = modules["\2"];'),
        (r'^import (\w+|\{.+\}) from "\./(.+)";', r'const \1 = modules["\2"];'),
    )
]


@functools.cache
def bundled(*names: str) -> Markup:
    """Modules of `static` as one script, each after those that it imports.

    Of the syntax of modules it knows what ours use: an import a line, from a file by its name; `export const`,
    `export class`, and `export { NAME as default }` at the end of a module that exports nothing else.
    """
    parts = ['"use strict";', "const modules = {};"]
    for name in names:
        text = str(resource(name))
        exports = _EXPORTED.findall(text)
        for pattern, replacement in _MODULE_SYNTAX:
            text = pattern.sub(replacement, text)
        parts.append(f"modules[{json.dumps(name)}] = (() => {{\n{text}\nreturn {{ {', '.join(exports)} }};\n}})();")
    return Markup("\n".join(parts))  # noqa: S704 - ours


def compact_json(value: JSON, figures: int = 17) -> str:
    """JSON text for a page: numbers with so many figures at most, those that are not finite as null."""

    def rounded(value: JSON) -> JSON:
        if isinstance(value, float):
            if not math.isfinite(value):
                return None
            return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.{figures}g}")
        if isinstance(value, list | tuple):
            return [rounded(item) for item in value]
        return {name: rounded(item) for name, item in value.items()} if isinstance(value, dict) else value

    return json.dumps(rounded(value), separators=(",", ":"))


def script_json(text: str) -> Markup:
    """JSON text that can stand inside a script element, whatever its strings hold."""
    escaped = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return Markup(escaped)  # noqa: S704 - no character is left that HTML would read


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar: its name for people, a name of `COLOURS`, what it took [s], its share of the whole [0 to 1]."""

    label: str
    colour: str
    seconds: float
    fraction: float
