"""The tables of training speed in docs/speed.md, made of the committed results.

    python -m bench.train.table [--check]

Of each case the newest file of results counts. `--check` changes nothing, and fails if the pages are not what the
results say. Bars that are missed are said to be.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.forecast.registration import RESULTS
from bench.train import results
from bench.train.bars import BARS, GPU_BAR
from bench.train.cases import CASES
from stoker.records.codec import JSON

BEGIN, END = "<!-- bench-train -->", "<!-- /bench-train -->"
ROOT = Path(__file__).parents[2]
DETAILS = ROOT / "docs" / "speed.md"

Content = Mapping[str, JSON]

_TRAINERS = ("lightning", "accelerate", "hf_trainer")
_COLUMNS = {
    "bf16": (
        "the best of Lightning, Accelerate, HF Trainer, bf16 on",
        (*(f"{name}_bf16" for name in _TRAINERS), *_TRAINERS),
    ),
    "default": ("the best of those and Keras 3, as they come", (*_TRAINERS, "keras_torch", "keras_jax")),
    "by_hand": ("the loop tuned by hand", ("by_hand",)),
}
"""Columns of the first table: heading, and whom Stoker is held against. Where a trainer is faster without its bf16, it
is taken without: nobody would turn it on."""


def newest(prefix: str, folder: Path = RESULTS) -> Content | None:
    """The newest results whose file is called `prefix_DATE.json`; None where there are none."""
    found = sorted(folder.glob(f"{prefix}_????-??-??.json"))
    return results.read(found[-1]) if found else None


def cell(content: Content, names: Iterable[str], bar: float) -> str:
    """Stoker's ratio to the one of `names` that it leaves behind least: `1.31× (1.28 to 1.35), HF Trainer`."""
    ratios = content["ratios"]["wall"]
    there = {name: ratios[name] for name in names if ratios.get(name) is not None}
    if not there:
        return "not measured"
    name = min(there, key=lambda one: there[one]["median"])
    ratio = there[name]
    words = f"{ratio['median']:.2f}× ({ratio['low']:.2f} to {ratio['high']:.2f})"
    if len(there) > 1:
        words += f", {content['contenders'][name]['title']}"
    if ratio["median"] >= bar:
        return words
    return f"{words}; **missed**: {bar:g}×"


def ratios_table(cases: Mapping[str, Content], columns: Sequence[str]) -> list[str]:
    """Stoker against others, a row for each case."""
    rows = [["how many times as fast Stoker is as", *(_COLUMNS[column][0] for column in columns)]]
    for name, content in cases.items():
        bars = BARS[name]
        cells = [cell(content, _COLUMNS[column][1], getattr(bars, column)) for column in columns]
        rows.append([CASES[name].title, *cells])
    return markdown(rows)


def everybody_table(cases: Mapping[str, Content]) -> list[str]:
    """Everybody's rate, and how many times as fast Stoker is: a row for each contender, a column for each case."""
    names = list(dict.fromkeys(name for content in cases.values() for name in content["contenders"]))
    titles = {name: one["title"] for content in cases.values() for name, one in content["contenders"].items()}
    rows = [["samples/s; Stoker is", *(CASES[case].title for case in cases)]]
    rows += [[titles[name], *(_of_one(case, content, name) for case, content in cases.items())] for name in names]
    return markdown(rows)


def _of_one(case: str, content: Content, name: str) -> str:
    one = content["contenders"].get(name)
    if one is None:
        return "not asked"
    if one["missing"]:
        return "not installed"
    if "failed" in one:
        return "failed"
    rate = content["samples_per_s"][name]
    if rate is None:
        return "no quiet slice"
    words = f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
    ratio = content["ratios"]["wall"].get(name)
    if ratio is None:
        return words
    bar = BARS[case].single.get(name, 0.0)
    return f"{words}; {ratio['median']:.2f}×" + (f"; **missed**: {bar:g}×" if ratio["median"] < bar else "")


def beside_table(cases: Mapping[str, Content], accuracy: Content | None) -> list[str]:
    """What belongs to the ratios: seconds to the first update, peaks of memory, and what was learned."""
    heading = [
        "",
        "first update: Stoker",
        "Lightning",
        "peak: Stoker",
        "Lightning",
        "by hand",
        "learned: Stoker",
        "fp32",
        "seeds differ by",
    ]
    rows = [heading]
    for name, content in cases.items():
        starts = [_first_update(content, who) for who in ("stoker", "lightning")]
        peaks = [_peak(content, who) for who in ("stoker", "lightning", "by_hand")]
        rows.append([CASES[name].title, *starts, *peaks, *_learned(name, accuracy)])
    return markdown(rows)


def _first_update(content: Content, name: str) -> str:
    sets = content["contenders"].get(name, {"sets": []})["sets"]
    return f"{statistics.median(one['start']['first_update_s'] for one in sets):.1f} s" if sets else "–"


def _peak(content: Content, name: str) -> str:
    sets = content["contenders"].get(name, {"sets": []})["sets"]
    peaks = [max(one["start"]["start_peak_bytes"], one.get("peak_bytes", 0)) for one in sets]
    return f"{max(peaks) / 2**20:,.0f} MiB" if peaks else "–"


def _learned(name: str, accuracy: Content | None) -> list[str]:
    """Stoker's mean over seeds, fp32's, and the standard deviation of fp32's seeds."""
    found = None if accuracy is None else accuracy["cases"].get(name)
    if found is None or "compared" not in found:
        return ["not measured", "", ""]
    values = [found["compared"][key] for key in ("stoker", "fp32", "deviation_of_seeds")]
    if found["measure"] == "accuracy":
        return [f"{100 * value:.2f} %" for value in values]
    return [f"loss {values[0]:.4f}", f"{values[1]:.4f}", f"{values[2]:.4f}"]


def gpu_table(cases: Mapping[str, Content]) -> list[str]:
    """Stoker against compiled loops on a GPU: a row for each case; nothing where none was measured."""
    if not cases:
        return []
    rows = [["on a GPU", "device", "the best loop tuned by hand", "samples/s", "MFU of Stoker", "of that loop"]]
    for content in cases.values():
        others = [name for name, one in content["contenders"].items() if one["group"] == "by_hand"]
        known = [name for name in others if content["samples_per_s"].get(name)]
        best = max(known, key=lambda name: content["samples_per_s"][name], default=None)
        mfu = content["mfu"]
        rows.append(
            [
                content["case"]["title"],
                content["machine"].get("gpu", {}).get("name", "?"),
                cell(content, others, GPU_BAR),
                f"{content['samples_per_s']['stoker']:,.0f}",
                f"{mfu['stoker']:.1%}",
                "–" if best is None else f"{mfu[best]:.1%}",
            ]
        )
    return ["", *markdown(rows)]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table; the first row is its heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def replaced(page: str, lines: Sequence[str]) -> str:
    """The page with `lines` between the markers.

    Raises:
        ValueError: it has no such markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the markers {BEGIN} and {END}")
    return "\n".join([before + BEGIN, *lines, END]) + after


def measured_on(cases: Mapping[str, Content]) -> str:
    """The machines with the days, and where there are several, with their cases."""
    by_machine: dict[str, list[str]] = {}
    for name, content in cases.items():
        machine = content["machine"]
        where = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
        by_machine.setdefault(where, []).append(name)
    words = []
    for where, names in sorted(by_machine.items(), key=lambda pair: -len(pair[1])):
        days = ", ".join(sorted({cases[name]["date"] for name in names}))
        of = "" if len(by_machine) == 1 else f", {', '.join(CASES[name].title.partition(',')[0] for name in names)}"
        words.append(f"{where} ({days}{of})")
    return " and on ".join(words)


def pages(folder: Path = RESULTS) -> dict[Path, list[str]]:
    """What belongs between the markers of each page."""
    cases = {name: found for name in CASES if (found := newest(f"train_{name}", folder)) is not None}
    if not cases:
        return {DETAILS: ["Not measured yet."]}
    told = [f"Measured on {measured_on(cases)}; in brackets 95 %.", ""]
    gpus = [found for path in sorted(folder.glob("train_gpu_*.json")) if (found := results.read(path)).get("ratios")]
    details = [
        *told,
        *ratios_table(cases, list(_COLUMNS)),
        "",
        *everybody_table(cases),
        "",
        *beside_table(cases, newest("train_accuracy", folder)),
        *gpu_table({one["case"]["name"]: one for one in gpus}),
    ]
    return {DETAILS: details}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is not up to date")
    given = parser.parse_args(arguments)
    stale = []
    for path, lines in pages().items():
        text = path.read_text(encoding="utf-8")
        new = replaced(text, lines)
        if new != text:
            stale.append(path)
            if not given.check:
                path.write_text(new, encoding="utf-8")
    print(
        "\n".join(f"{'stale' if given.check else 'written'}: {path.relative_to(ROOT)}" for path in stale) or "no change"
    )
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
