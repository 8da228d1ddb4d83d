from __future__ import annotations

import pytest

from stoker.cli.bench_serve import (
    parse_headers,
    parse_objective,
    render_limit,
    render_measurement,
    render_rate,
    settings_words,
    trial_line,
)
from stoker.errors import BadJob
from stoker.records import ServiceSettings
from stoker.records.service import LoadGenerator, LoadMeasurement, Objective, Quantile, ServingLimit, SettingsTrial
from tests.cli.page import Page

OBJECTIVE = Objective(q=0.99, within_s=0.02)
INFINITE = float("inf")


def measured(rate: float | None = 100.0, **fields: object) -> LoadMeasurement:
    """A measurement that held."""
    values: dict[str, object] = {
        "loop": "open" if rate else "closed",
        "rate": rate,
        "connections": 8,
        "duration_s": 10.0,
        "requests": 1000,
        "answered": 990,
        "good": 980,
        "rows": 990,
        "mean_s": 0.004,
        "held": "held",
        "failures": {"HTTP 503": 10},
        "quantiles": (
            Quantile(q=0.5, seconds=0.004, low=0.003, high=0.005),
            Quantile(q=0.9, seconds=0.008, low=0.007, high=0.009),
            Quantile(q=0.99, seconds=0.012, low=0.011, high=INFINITE),
        ),
        "generator": LoadGenerator(late_p99_s=0.0001, cpu_s_per_request=3e-5, most_in_flight=7),
        "server_cpu_s": 1.98,
        "warnings": ("the generator was late",),
    }
    return LoadMeasurement(**{**values, **fields})  # type: ignore[arg-type]


def printed(render: object, *arguments: object) -> str:
    """What it prints on a wide page."""
    console = Page(160)
    render(*arguments, console)  # type: ignore[operator]
    return console.text


@pytest.mark.parametrize(
    ("word", "q", "within_s"),
    [("p99=20ms", 0.99, 0.02), ("p99.9=0.5s", 0.999, 0.5), ("p50=800us", 0.5, 0.0008), (" p95=1.5ms ", 0.95, 0.0015)],
)
def test_objectives_are_read(word: str, q: float, within_s: float) -> None:
    """A quantile and a time with its unit; what is printed of it can be read again."""
    found = parse_objective(word)
    assert (found.q, found.within_s) == pytest.approx((q, within_s))
    assert parse_objective(str(found)).within_s == pytest.approx(within_s)


@pytest.mark.parametrize("word", ["p99", "p100=2ms", "p0=2ms", "99=2ms", "p99=20", "p99=0ms", "p99=-1ms", "p99=2h"])
def test_objectives_that_mean_nothing_are_refused(word: str) -> None:
    """With an example of one that does."""
    with pytest.raises(BadJob, match="p99=20ms"):
        parse_objective(word)


def test_headers_are_read() -> None:
    """Name and value, colons within the value kept; without one it is refused."""
    assert parse_headers(["Authorization: Bearer a:b"]) == {"Authorization": "Bearer a:b"}
    with pytest.raises(BadJob, match="NAME: VALUE"):
        parse_headers(["nothing"])


def test_a_measurement_shows_rates_latencies_failures_and_doubts() -> None:
    """Everything a reader needs to trust it or not."""
    page = printed(render_measurement, "digits", measured())
    for words in (
        "99 answers/s",
        "98 of them good",
        "p99",
        "12 ms",
        "11 ms – unbounded",
        "10 × HTTP 503",
        "late",
        "30 µs",
        "2 ms",
    ):
        assert words in page
    assert "8 callers" in printed(render_measurement, "digits", measured(rate=None))


def test_a_limit_shows_what_was_chosen_beside_the_default() -> None:
    """The rate, the settings, the gain, and latencies at shares of the rate."""
    settings = ServiceSettings(instances=2, threads=1, max_batch_rows=16, max_delay_s=0.001)
    default = SettingsTrial(settings=ServiceSettings(), rate=100.0, why="")
    chosen = SettingsTrial(settings=settings, rate=150.0, why="held again")
    found = ServingLimit(
        model="digits",
        objective=OBJECTIVE,
        machine="a CPU",
        default=default,
        chosen=chosen,
        trials=(default, chosen),
        levels=(measured(75.0), measured(150.0, was_cut=True)),
        took_s=100.0,
        is_complete=True,
        written_to="models/digits/service.json",
    )
    page = printed(render_limit, found)
    for words in (
        "holds 150 requests/s within p99=20ms",
        "instances 2 × threads 1, batch 16, delay 1 ms",
        "1.50x",
        "2 settings tried in 1 min 40 s",
        "cut short",
        "models/digits/service.json",
    ):
        assert words in page


def test_a_rate_that_was_not_held_is_no_number() -> None:
    """A trial that held nothing says why, and a server without settings is not given any."""
    lost = SettingsTrial(settings=None, rate=0.0, why="it held no rate that was tried", tried=(measured(),))
    assert "it held no rate" in trial_line(lost, OBJECTIVE).plain
    assert "held no rate within p99=20ms" in printed(render_rate, "digits", OBJECTIVE, lost)
    assert settings_words(None) == "as the server runs"
