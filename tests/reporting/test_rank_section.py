"""All processes of a run in the report."""

from __future__ import annotations

import dataclasses

import pytest

from stoker.records import Layout, RankTimes, Report
from stoker.reporting.colours import COLOURS
from stoker.reporting.rank_section import LANE_COLOURS, efficiency, lane_picture, merged, rank_lines, shown_stretch
from tests.reporting import story
from tests.reporting.test_html import page
from tests.reporting.test_merged_ranks import noted, pair


def with_ranks(ranks: list[RankTimes], *, alone_threads: int = 2) -> Report:
    """A run on two processes of two threads, of which the planner looked at one process too."""
    whole = story.report(story.whole_run())
    decision = story.decision()
    chosen, *others = decision.candidates
    chosen = dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, layout=Layout(replicas=2)))
    alone = dataclasses.replace(
        others[0], plan=dataclasses.replace(others[0].plan, threads=alone_threads), forecast=story.forecast(1.8)
    )
    decision = dataclasses.replace(decision, candidates=(chosen, alone))
    return dataclasses.replace(whole, decision=decision, ranks=tuple(ranks))


def test_the_section_names_the_slowest_and_shows_each_rank() -> None:
    """The verdict, the pictures in words, and a row for each process."""
    found = page(with_ranks(pair()))
    assert "Rank 1 is the slowest in 79 % of the updates" in found.text
    assert found.tags.count("svg") == page(story.report(story.whole_run())).tags.count("svg") + 2
    for words in (
        "waiting for the slowest",
        "communication not hidden",
        "1: worker 1 on here",
        "rank 0",
        "Updates 98 to 100",
    ):
        assert words in found.text


def test_a_run_of_one_process_has_no_such_section() -> None:
    """Nothing is said where no process waits."""
    assert "waiting for the slowest" not in page(story.report(story.whole_run())).text
    assert rank_lines(story.report(story.whole_run())) == []
    assert shown_stretch(with_ranks([noted(0, [0.1], [0.1], size=1)])) is None


def test_the_longest_stretch_is_shown_and_the_others_are_told() -> None:
    """A process that was lost does not hide what was before."""
    after = noted(0, [0.05] * 5, [0.05] * 5, size=1, first=100, began_at=9.0)
    found = page(with_ranks([*pair(), after]))
    assert "Processes met 2 times" in found.text
    assert "from update 1 to 100" in found.text


def test_efficiency_is_against_the_forecast_for_one_process() -> None:
    """With as many threads each; else only how many times its rate is reached."""
    report = with_ranks(pair())
    together = merged(pair())
    assert together is not None
    words = efficiency(together, report)
    assert words.startswith("Processes do work of their own")
    assert "1.80 times what is forecast for one (824 samples/s, measured here)" in words
    assert "a scaling efficiency of 90 %" in words
    assert "efficiency" not in efficiency(together, with_ranks(pair(), alone_threads=4))
    unknown = dataclasses.replace(report, decision=None)
    assert efficiency(together, unknown) == "Processes do work of their own 74 % of the training time."


@pytest.mark.parametrize(
    ("layout", "device", "words"),
    [
        (Layout(stages=2), "cpu", "includes the bubble"),
        (Layout(shards=2), "cuda:0", "communication within passes counts as compute"),
    ],
)
def test_what_a_layout_hides_is_told(layout: Layout, device: str, words: str) -> None:
    """A pipeline's bubble is not taken for slow links, or hidden waits for compute."""
    report = with_ranks(pair())
    assert report.decision is not None
    chosen, *others = report.decision.candidates
    assert words not in page(report).text
    chosen = dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, layout=layout, device=device))
    decision = dataclasses.replace(report.decision, candidates=(chosen, *others))
    assert words in page(dataclasses.replace(report, decision=decision)).text


def test_doubt_about_clocks_is_told() -> None:
    """Lanes of other hosts may be shifted; the page says by how much."""
    one, other = pair()
    found = page(with_ranks([one, dataclasses.replace(other, uncertainty_s=0.0021)]))
    assert "agree to 2.1 ms" in found.text


@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_picture_has_a_few_lanes_and_always_the_slowest(size: int) -> None:
    """Of many processes not all are drawn, but the one that is waited for is."""
    slow = size - 2
    ranks = [noted(rank, [0.07 if rank == slow else 0.05], [0.07], size=size) for rank in range(size)]
    found = merged(ranks)
    assert found is not None
    drawn = lane_picture("Update 1", found.updates)
    assert len(drawn.lanes) == min(size, 8)
    assert slow in dict(drawn.lanes)
    assert f"the others wait 20 ms for rank {slow}" in drawn.words


def test_lanes_have_colours_of_the_page() -> None:
    """Every part is drawn in a colour that the page knows in light and dark, no two in the same."""
    assert set(LANE_COLOURS.values()) <= set(COLOURS)
    assert len(set(LANE_COLOURS.values())) == len(LANE_COLOURS)
