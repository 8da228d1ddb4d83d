"""`stoker bench-serve` end to end: servers of tiny models in processes of their own, asked over sockets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import BadArtifact, BadJob, ServiceError
from stoker.loadtesting.load_test import Load, bench_serve, highest_rate_of_url, measure_models, measure_url
from stoker.records import ServiceSettings, dumps, loads
from stoker.records.service import LoadMeasurement, Objective, SettingsTrial
from stoker.testing.tiny_models import tiny_artifact
from tests.flow.command import stoker_here
from tests.predicting.builders import whole_model
from tests.serving.asking import running

EASY = Objective(q=0.9, within_s=2.0)


@pytest.mark.slow
def test_a_search_writes_the_settings_that_a_server_loads(tmp_path: Path) -> None:
    """What was found is next to the versions, with its basis; limits that the user had set are kept."""
    tiny_artifact(tmp_path, name="digits")
    place = tmp_path / "digits" / "service.json"
    place.write_text(dumps(ServiceSettings(max_queue_rows=77, max_batch_rows=3, basis="a guess")), encoding="utf-8")
    told: list[SettingsTrial] = []
    found = bench_serve(tmp_path, EASY, seconds=3.0, load=Load(connections=16), on_trial=told.append)
    assert found.chosen.rate > 0
    assert found.trials == tuple(told)
    assert found.default.settings is not None
    assert replace(found.default.settings, instances=None, threads=None) == ServiceSettings(max_queue_rows=77)
    assert found.written_to == str(place)
    written = loads(place.read_bytes(), ServiceSettings)
    assert written.max_queue_rows == 77
    assert "p90=2000ms" in written.basis
    assert found.chosen.settings is not None
    assert (written.instances, written.max_batch_rows) == (
        found.chosen.settings.instances,
        found.chosen.settings.max_batch_rows,
    )


def test_one_rate_is_measured_and_told_as_json(tmp_path: Path) -> None:
    """The command prints a record that reads back, with the CPU time of the service in it; nothing is written."""
    tiny_artifact(tmp_path, name="words", kind="tokens")
    done = stoker_here("bench-serve", tmp_path, "--rate", "50", "--seconds", "0.4", "--sizes", "tokens=2-9", "--json")
    found = loads(done.out, LoadMeasurement)
    assert (found.requests, found.answered, found.failures) == (20, 20, {})
    assert found.server_cpu_s is not None
    assert not (tmp_path / "words" / "service.json").exists()


@pytest.mark.slow
def test_a_model_without_a_batch_is_measured(tmp_path: Path) -> None:
    """By its URL and from its directory, with inputs made up, of one request, and of several; each is answered."""
    whole_model(tmp_path)
    one, several = tmp_path / "one.npz", tmp_path / "several.npz"
    np.savez(one, x=np.ones((3, 4), np.float32), k=np.float32(2))
    np.savez(several, x=np.ones((5, 3, 4), np.float32), k=np.ones(5, np.float32))
    with running(tmp_path / "whole") as server:
        for inputs in (None, one, several):
            found = measure_url(
                server.started.http, "whole", rate=None, callers=2, seconds=0.2, load=Load(inputs=inputs)
            )
            assert (found.answered > 0, found.failures) == (True, {})
    found = measure_models(tmp_path / "whole", rate=20, callers=None, seconds=0.2, load=Load(inputs=several))
    assert (found.answered, found.failures) == (4, {})


@pytest.mark.slow
def test_a_running_server_is_asked_by_its_url(tmp_path: Path) -> None:
    """Callers, a rate, and the highest rate; with inputs made up from its metadata, or from a file."""
    tiny_artifact(tmp_path, name="digits")
    rows = tmp_path / "rows.npz"
    np.savez(rows, x=np.ones((5, 8), dtype=np.float32))
    with running(tmp_path) as server:
        url = server.started.http
        callers = measure_url(url, "digits", rate=None, callers=2, seconds=0.2)
        assert callers.answered == callers.requests > 2
        asked = measure_url(url, "digits", rate=100, callers=None, seconds=0.2, load=Load(inputs=rows, rows=3))
        assert (asked.answered, asked.rows) == (20, 60)
        held = highest_rate_of_url(url, "digits", EASY, seconds=4.0)
        assert held.rate > 0
        assert held.settings is None
        with pytest.raises(ServiceError, match="nothing"):
            measure_url(url, "nothing", rate=1, callers=None, seconds=1)
        np.savez(rows, y=np.ones((5, 8)))
        with pytest.raises(BadJob, match="do not fit"):
            measure_url(url, "digits", rate=1, callers=None, seconds=1, load=Load(inputs=rows))
        np.savez(rows, x=np.ones((5, 9), dtype=np.float32))
        with pytest.raises(ServiceError, match="400"):
            measure_url(url, "digits", rate=1, callers=None, seconds=1, load=Load(inputs=rows))


def test_one_of_several_models_has_to_be_named(tmp_path: Path) -> None:
    """The text lists them; a name that is not there is refused, and so is a directory without a model."""
    tiny_artifact(tmp_path, name="one")
    tiny_artifact(tmp_path, name="two")
    with pytest.raises(BadJob, match="one, two"):
        measure_models(tmp_path, rate=1, callers=None, seconds=1)
    with pytest.raises(BadJob, match="'three'"):
        measure_models(tmp_path, model="three", rate=1, callers=None, seconds=1)
    with pytest.raises(BadArtifact, match="no exported model"):
        measure_models(tmp_path / "none", rate=1, callers=None, seconds=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "MODELS"),
        (("models", "--url", "http://x"), "one of them"),
        (("--url", "http://127.0.0.1:1"), "which model"),
        (("models",), "what is to be found"),
        (("models", "--slo", "soon"), "p99=20ms"),
        (("models", "--rate", "1", "--callers", "1"), "not both"),
        (("models", "--callers", "1", "--constant"), "--constant is for a rate"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """With exit code 2, before anything is started."""
    tiny_artifact(tmp_path / "models", name="digits")
    here = [str(tmp_path / word) if word == "models" else word for word in words]
    done = stoker_here("bench-serve", *here)
    assert done.code == 2
    assert said in " ".join(done.err.split())
