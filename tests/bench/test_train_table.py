"""Tables made of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.train import table
from bench.train.cases import CASES


def _ratio(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.1, "high": median + 0.1, "rounds": 10, "sets": 2}


def _contender(title: str, group: str) -> dict[str, Any]:
    start = {"first_update_s": 2.0, "start_peak_bytes": 300 * 2**20, "losses": [2.0]}
    return {
        "title": title,
        "group": group,
        "missing": [],
        "sets": [{"start": start, "rounds": [], "peak_bytes": 400 << 20}],
    }


def _content(**ratios: float) -> dict[str, Any]:
    contenders = {name: _contender(name.replace("_", " "), "default") for name in ratios}
    contenders["stoker"] = _contender("Stoker", "stoker")
    return {
        "date": "2026-11-21",
        "machine": {"cpu": "a CPU", "cores": 2, "torch": "2.13.0"},
        "contenders": contenders,
        "samples_per_s": dict.fromkeys(contenders, 1234.0),
        "ratios": {"wall": {name: _ratio(ratio) for name, ratio in ratios.items()}},
    }


def test_stoker_is_held_against_whoever_is_fastest() -> None:
    """The least ratio counts, with its name."""
    content = _content(lightning_bf16=1.9, hf_trainer_bf16=1.3, keras_jax=0.5)
    assert table.cell(content, ["lightning_bf16", "hf_trainer_bf16"], 1.25) == "1.30× (1.20 to 1.40), hf trainer bf16"


def test_a_bar_that_is_missed_is_said_to_be() -> None:
    """Rows that Stoker loses are printed as what they are."""
    assert "**missed**: 1.25×" in table.cell(_content(lightning_bf16=1.2), ["lightning_bf16"], 1.25)
    assert "missed" not in table.cell(_content(lightning_bf16=1.25), ["lightning_bf16"], 1.25)


def test_a_contender_without_figures_is_not_left_out() -> None:
    """Who is not installed, failed, or never had a quiet slice has a row that says so."""
    content = _content(lightning=2.0, keras_jax=1.0, plain=1.0)
    content["contenders"]["keras_jax"] |= {"missing": ["jax"]}
    content["contenders"]["plain"] |= {"failed": "ended with 1"}
    content["samples_per_s"]["lightning"] = None
    text = "\n".join(table.everybody_table({"gpt": content}))
    assert "| keras jax | not installed |" in text
    assert "| plain | failed |" in text
    assert "| lightning | no quiet slice |" in text
    assert "| Stoker | 1,234 |" in text


def test_a_contender_may_have_a_bar_of_its_own() -> None:
    """The tiny MLP is to leave Lightning further behind than the others."""
    text = "\n".join(table.everybody_table({"mlp": _content(lightning=2.0, accelerate=2.0)}))
    assert "| lightning | 1,234; 2.00×; **missed**: 2.4× |" in text
    assert "| accelerate | 1,234; 2.00× |" in text


def test_only_what_is_between_the_markers_changes() -> None:
    """The rest of a page is its author's."""
    page = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.replaced(page, ["new", "table"]) == f"before\n{table.BEGIN}\nnew\ntable\n{table.END}\nafter\n"
    with pytest.raises(ValueError, match="markers"):
        table.replaced("a page without", ["new"])


def test_pages_are_made_of_the_newest_results(tmp_path: Path) -> None:
    """A case that was measured twice has one row, and one that was not has none."""
    for date, ratio in (("2026-11-20", 1.0), ("2026-11-21", 3.0)):
        content = _content(lightning_bf16=ratio, lightning=ratio, by_hand=ratio)
        (tmp_path / f"train_gpt_{date}.json").write_text(json.dumps(content), encoding="utf-8")
    found = table.pages(tmp_path)
    assert any(
        f"| {CASES['gpt'].title} | 3.00× (2.90 to 3.10), lightning bf16" in line for line in found[table.DETAILS]
    )
    assert not any(CASES["lstm"].title in line for line in found[table.DETAILS])


def test_cases_of_several_machines_are_named_with_theirs() -> None:
    """The larger part first; of one machine no case is named."""
    here, there = _content(lightning=2.0), _content(lightning=2.0)
    there |= {"date": "2026-11-20", "machine": {"cpu": "another", "cores": 4, "torch": "2.13.0"}}
    assert table.measured_on({"gpt": here, "lstm": here}) == "a CPU, 2 cores, torch 2.13.0 (2026-11-21)"
    assert table.measured_on({"mlp": there, "gpt": here, "lstm": here}) == (
        "a CPU, 2 cores, torch 2.13.0 (2026-11-21, GPT 6 × 384, LSTM 2 × 256) and on "
        "another, 4 cores, torch 2.13.0 (2026-11-20, MLP 784-256-128-10)"
    )


def test_what_was_learned_stands_beside_the_speed(tmp_path: Path) -> None:
    """Accuracy of images in percent, as the seeds' mean, and their spread."""
    compared = {"stoker": 0.921, "fp32": 0.922, "difference": -0.001, "deviation_of_seeds": 0.002}
    accuracy = {"cases": {"resnet9_w32": {"measure": "accuracy", "compared": compared}}}
    rows = table.beside_table({"resnet9_w32": _content(lightning=2.0)}, accuracy)
    assert rows[-1].endswith("| 92.10 % | 92.20 % | 0.20 % |")
    assert "| 400 MiB | 400 MiB | – |" in rows[-1]


def test_the_pages_say_what_the_results_say() -> None:
    """`python -m bench.train.table` was run after the last measurement."""
    assert table.main(["--check"]) == 0
