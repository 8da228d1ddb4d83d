from __future__ import annotations

import torch

from bench.many.site_losses import CASES, Case, Sites, Size

SIZE = Size(layers=1, width=8, context=4, rate=1e-2, updates=8)


def trained(case: Case, updates: int) -> Sites:
    """Sites after so many updates on random tokens, the same in each case."""
    random = torch.Generator().manual_seed(0)
    sites = Sites(SIZE, case)
    for number in range(updates):
        tokens = torch.randint(256, (4, 5), generator=random)
        sites.update(number, 0.5, tokens[:, :-1], tokens[:, 1:])
    return sites


def test_averaged_sites_are_equal_after_an_exchange_and_not_before() -> None:
    """Without an outer momentum what is shared is the mean of the sites, which all of them take over."""
    before, after = trained(Case(every=4), 3), trained(Case(every=4), 4)
    one, other = (row.weights for row in before.rows)
    assert not torch.equal(one, other)
    assert before.exchanges == 0
    assert after.exchanges == 1
    assert all(torch.equal(row.weights, after.start) for row in after.rows)
    assert torch.allclose(before.end(), (one + other) / 2, atol=1e-7)


def test_a_correction_that_is_carried_leaves_the_mean_of_the_sites_where_it_was() -> None:
    """Sites keep what they learned since they sent: an exchange moves them towards each other, and no further."""
    apart, together = (trained(Case(every=2, overlap=overlap, carries=True), 3) for overlap in (5, 1))
    one, other = (torch.stack([row.weights for row in sites.rows]).mean(0) for sites in (apart, together))
    assert together.exchanges == 1
    assert torch.allclose(one, other, atol=1e-7)
    distances = [float((sites.rows[0].weights - sites.rows[1].weights).norm()) for sites in (apart, together)]
    assert distances[1] < distances[0]


def test_lockstep_is_one_row_and_the_first_part_of_a_run_has_an_interval_of_its_own() -> None:
    """Nothing is exchanged in lockstep; early exchanges count until their share of the run is over."""
    assert trained(CASES["lockstep"], 4).exchanges == 0
    assert len(trained(CASES["lockstep"], 1).rows) == 1
    assert trained(Case(every=4, early=0.6, early_every=2), 8).exchanges == 4
    assert trained(Case(every=4, early=0.4, early_every=2), 8).exchanges == 2
