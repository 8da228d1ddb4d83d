"""Forecasts of published steps: cases that cannot be forecast are named, and the others are forecast."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.forecast import published

JOB = """
import stoker, torch

def job(width: int = 8, batch: int = 16) -> stoker.Job:
    return stoker.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2)),
        data=(torch.zeros(batch, 4), torch.zeros(batch, dtype=torch.int64)),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=batch,
        until=stoker.updates(2),
        seed=0,
    )
"""
GOOD = {
    "id": "good",
    "group": "small",
    "job": "job.py",
    "set": "{}",
    "on": "a100-80",
    "plan": '{"micro_batch": 16}',
    "what": "step",
    "measured_step_ms": "1.0",
}


def document_of(
    cases: list[dict[str, str]], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON document for these cases."""
    (folder / "job.py").write_text(JOB)
    with (folder / "cases.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*GOOD, "precision"])
        writer.writeheader()
        writer.writerows(cases)
    monkeypatch.setattr(sys, "argv", ["published", str(folder / "cases.csv"), "--json"])
    code = published.main()
    return code, json.loads(capsys.readouterr().out)


def test_cases_that_cannot_be_forecast_are_named_and_the_others_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each bad case has a sentence with what is wrong and, where there is one, the nearest name."""
    bad = {
        "unknown setting": ({"set": '{"widht": 4}'}, "width"),
        "setting of another type": ({"set": '{"width": "wide"}'}, "width"),
        "unknown field of the plan": ({"plan": '{"micro_bach": 4}'}, "micro_batch"),
        "value of the plan": ({"plan": '{"micro_batch": "many"}'}, "micro_batch is a number"),
        "no JSON": ({"set": "{width: 4}"}, "set is no JSON"),
        "no object": ({"plan": "[1]"}, "plan is [1], wanted a JSON object"),
        "unknown GPU": ({"on": "h1000"}, "h100"),
        "two GPUs": ({"on": "a100"}, "places (a100-80"),
        "machines that are not full": ({"on": "12xh100", "plan": '{"layout": {"replicas": 12}}'}, "12"),
        "too few processes": ({"on": "8xh100", "plan": '{"layout": {"replicas": 4}}'}, "4 processes, and 8xh100 has 8"),
        "no layout": ({"on": "8xh100"}, "has 1 processes, and 8xh100 has 8 devices"),
        "a larger micro-batch": ({"plan": '{"micro_batch": 32}'}, "micro_batch is 32, and a process has 16"),
        "more blocks": ({"plan": '{"micro_batch": 16, "checkpointed_blocks": 9}'}, "the model has"),
        "absent job": ({"job": "jobs.py"}, "job.py"),
        "no measurement": ({"measured_step_ms": "-"}, "measured_step_ms is '-'"),
        "other part": ({"what": "backward"}, "wanted step or forward"),
        "no device": ({"on": ""}, "the case has no on"),
        "a model that raises": ({"set": '{"width": -1}'}, "Error: "),
    }
    cases = [GOOD | {"id": name} | changes for name, (changes, _) in bad.items()]
    code, document = document_of([*cases, GOOD], tmp_path, monkeypatch, capsys)
    assert code == 0
    assert [case["id"] for case in document["cases"]] == ["good"]
    problems = {one["id"]: one["problem"] for one in document["failed"]}
    assert list(problems) == list(bad)
    for name, (_, words) in bad.items():
        assert words in problems[name], (name, problems[name])


def test_a_file_of_bad_cases_alone_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing was forecast, the document has no statistics and the exit code says so."""
    code, document = document_of([GOOD | {"on": "h1000"}], tmp_path, monkeypatch, capsys)
    assert code == 1
    assert document["cases"] == []
    assert document["overall"] == {}


def test_words_of_other_programs_are_forecast_as_fields_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards, dtypes, accumulation and names of optimisers; fp16 over replicas is fp16."""
    usual = {"on": "4xa100-80", "id": "usual"}
    plain = {"micro_batch": 2, "precision": "bf16", "optimizer_implementation": "foreach", "layout": {"shards": 4}}
    words = {"zero_stage": 3, "dtype": "bfloat16", "grad_accum": 2, "optim": "sgd_foreach", "optimizer_states": None}
    replicas = {"micro_batch": 2, "layout": {"replicas": 4}}
    cases = [
        GOOD | usual | {"plan": json.dumps(plain)},
        GOOD | usual | {"plan": json.dumps(words)},
        GOOD | usual | {"plan": json.dumps(replicas | {"precision": "fp16"})},
        GOOD | usual | {"plan": json.dumps(replicas | {"precision": "bf16"}), "precision": "fp16 AMP"},
    ]
    code, document = document_of(cases, tmp_path, monkeypatch, capsys)
    assert (code, document["failed"]) == (0, [])
    times = [case["forecast_ms"] for case in document["cases"]]
    assert times[0] == times[1]
    assert times[2] == times[3]
