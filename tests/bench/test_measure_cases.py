"""Training steps measured on a GPU: without one, and what is written of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.forecast import measure_cases
from bench.forecast.measure_cases import (
    NO_DEVICE,
    UPDATES,
    main,
    products_tflops,
    step_ms_of,
    wait_for_others,
    write_cases,
)
from bench.forecast.published import GIB

ROW = {"id": "gpt2", "group": "language models", "job": "job.py", "set": "{}", "on": "h100", "plan": "{}"}


def measured(**changes: Any) -> dict[str, Any]:
    """A case of which a quarter of the updates was disturbed: 100 ms of kernels, for which the host takes as long."""
    undisturbed = {"id": "gpt2", "update_s": [0.1] * 9 + [0.3] * 3, "busy_s": 0.1, "host_s": 0.1, "peak_bytes": 2 * GIB}
    undisturbed["operations"] = []
    return undisturbed | changes


def cases_of(folder: Path, rows: list[dict[str, str]], results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What is written of these results."""
    write_cases(folder / "cases.csv", rows, {one["id"]: one for one in results})
    with (folder / "cases.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_updates_that_others_slowed_down_do_not_count(tmp_path: Path) -> None:
    """The lower quartile is written, and the memory in GiB, with all columns of the case."""
    assert step_ms_of(measured()) == pytest.approx(100.0)
    slowest_first = measured(update_s=[0.4 - 0.02 * number for number in range(UPDATES)])
    assert step_ms_of(slowest_first) == pytest.approx(225.0)
    (case,) = cases_of(tmp_path, [ROW], [measured()])
    assert case == ROW | {"measured_step_ms": "100.000", "measured_mem_gib": "2.000"}


@pytest.mark.parametrize(("host_s", "group"), [(0.114, "language models"), (0.116, "bound by the host")])
def test_what_waits_for_the_host_is_a_group_of_its_own(tmp_path: Path, host_s: float, group: str) -> None:
    """Where the host takes 1.15 times as long as all kernels: no forecast of a GPU is judged by it."""
    (case,) = cases_of(tmp_path, [ROW], [measured(host_s=host_s)])
    assert case["group"] == group


def test_the_rate_of_products_is_that_of_all_of_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By the shapes of both factors, a bias before them, a result after them; others do not count."""
    operations = [
        {"name": "aten::mm", "shapes": [[1000, 2000], [2000, 500], [1000, 500]], "count": 2, "seconds": 1e-3},
        {"name": "aten::addmm", "shapes": [[500], [1000, 2000], [2000, 500], [], []], "count": 1, "seconds": 1e-3},
        {"name": "aten::add", "shapes": [[1000, 2000]], "count": 1, "seconds": 5.0},
    ]
    assert products_tflops(operations) == pytest.approx(3 * 2e9 / 2e-3 / 1e12)
    assert products_tflops([]) == 0
    (tmp_path / "results.json").write_text(json.dumps({"cases": [measured(operations=operations)]}), "utf-8")
    assert main(["--show", str(tmp_path / "results.json")]) == 0
    assert "products    3 TFLOP/s" in capsys.readouterr().out


def test_cases_that_failed_are_left_out(tmp_path: Path) -> None:
    """Of those that were asked for the others are written; of none at all the columns."""
    rows = [ROW, ROW | {"id": "broken"}, ROW | {"id": "never begun"}]
    assert [case["id"] for case in cases_of(tmp_path, rows, [measured(), {"id": "broken", "problem": "?"}])] == ["gpt2"]
    assert cases_of(tmp_path, rows, []) == []


def test_cases_wait_until_all_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one does not wait; one whose others never come goes on when its patience ends."""
    folder, pauses = tmp_path / "compiled", list[float]()
    clock = iter(range(100))

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            (folder / "other").touch()

    monkeypatch.setattr(measure_cases.time, "sleep", sleep)
    monkeypatch.setattr(measure_cases.time, "perf_counter", lambda: float(next(clock)))
    wait_for_others(folder, "gpt2/compiled", 2)
    assert len(pauses) == 3
    wait_for_others(folder, "gpt2/fp8 compiled", 3)
    assert len(pauses) == 3
    wait_for_others(folder, "llama", 5, patience_s=10)
    assert len(pauses) < 15


def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, and a sentence that says why; nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([str(tmp_path / "cases.csv"), "--out", str(tmp_path / "out")]) == NO_DEVICE == 3
    assert "finds no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_begins_without_marks_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases compiled then would not be waited for now; what is measured is in both files."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure_cases, "surroundings", dict)
    cases, out = tmp_path / "cases.csv", tmp_path / "out"
    with cases.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerow(ROW)
    (out / "compiled").mkdir(parents=True)
    (out / "compiled" / "gpt2").touch()

    def in_a_process(case: dict[str, str], *_: object) -> dict[str, Any]:
        assert not (out / "compiled").exists()
        return measured(id=case["id"])

    monkeypatch.setattr(measure_cases, "in_a_process", in_a_process)
    assert main([str(cases), "--out", str(out)]) == 0
    assert "100.00 ms" in capsys.readouterr().out
    assert json.loads((out / "operations.json").read_text())["cases"] == [measured()]
    assert "gpt2" in (out / "cases.csv").read_text()


def test_an_expression_that_matches_no_case_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the cases that there are, and before anything is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cases = tmp_path / "cases.csv"
    cases.write_text("id,group\ngpt2,language models\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main([str(cases), "--out", str(tmp_path / "out"), "--only", "llama"])
    assert ended.value.code == 2
    assert "gpt2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
