from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stoker.devices.catalogue import builtin_catalogue
from stoker.devices.prices import prices_from_csv, prices_from_json, read_prices

KNOWN = builtin_catalogue()
HEADER = "device,provider,usd_per_hour,market,region,seen_on,source\n"


def test_csv():
    """Spellings of devices and markets, dollars with their sign, and blanks where a column is not needed."""
    text = HEADER + "RTX 4090, us, $0.40, spot, here, 2026-11-01, the bill\nh100,us,2,,,,\n"
    prices, problems = prices_from_csv(text, "p.csv", KNOWN)
    assert problems == ()
    first, second = prices
    assert (first.device, first.provider, first.usd_per_hour, first.market) == ("rtx-4090", "us", 0.4, "spot")
    assert (first.region, first.seen_on, first.source) == ("here", "2026-11-01", "the bill")
    assert (second.market, second.seen_on, second.source) == ("on demand", None, "the user's file")


def test_json():
    """A list, or an object with sources that rows name by key."""
    rows = [{"device": "l4", "provider": "us", "usd_per_hour": 0, "source": "b"}]
    for document, source in ((rows, "b"), ({"prices": rows, "sources": {"b": "the bill"}}, "the bill")):
        (price,), problems = prices_from_json(json.dumps(document), "p.json", KNOWN)
        assert problems == ()
        assert (price.device, price.usd_per_hour, price.source) == ("l4", 0, source)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("h1000,us,1,,,,", "line 2, column 'device': no such device 'h1000'"),
        ("a100,us,1,,,,", "'a100' may be any of a100-80, a100-40"),
        ("h100,,1,,,,", "column 'provider' is empty"),
        ("h100,us,cheap,,,,", "column 'usd_per_hour': wanted 0 to 1000 US dollars, found 'cheap'"),
        ("h100,us,-1,,,,", "'usd_per_hour'.*found '-1'"),
        ("h100,us,nan,,,,", "'usd_per_hour'.*found 'nan'"),
        ("h100,us,,,,,", "'usd_per_hour'.*found ''"),
        ("h100,us,1,rent,,,", "'market': wanted 'on demand' or 'spot', found 'rent'"),
        ("h100,us,1,,,May,", "'seen_on': wanted a date such as 2026-11-21, found 'May'"),
        ("h100,us,1,,,,,,", "has 2 more cells than the header"),
    ],
)
def test_a_bad_row_is_named_and_the_rest_is_used(row, said):
    """File, line, column, what was wanted and what was found; the row after it counts."""
    (price,), (problem,) = prices_from_csv(f"{HEADER}{row}\nl4,us,1,,,,\n", "p.csv", KNOWN)
    assert price.device == "l4"
    assert problem.startswith("p.csv, line 2")
    assert re.search(said, problem)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the header lacks device, provider, usd_per_hour"),
        ("device,provider\nh100,us\n", "the header lacks usd_per_hour"),
        (HEADER.replace("region", "zone"), "no such column 'zone'"),
    ],
)
def test_a_bad_header(text, said):
    """No row is read; the header's word is named."""
    prices, (problem,) = prices_from_csv(text, "p.csv", KNOWN)
    assert prices == ()
    assert said in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("3", "wanted a list"),
        ("[3]", "price 1: wanted an object, found 3"),
        ('[{"device": "l4", "usd": 1}]', "no such column 'usd'"),
        ('[{"device": "l4", "provider": "us", "usd_per_hour": true}]', "found True"),
    ],
)
def test_bad_json(text, said):
    """Reported with the file's name; nothing is raised."""
    prices, (problem,) = prices_from_json(text, "p.json", KNOWN)
    assert prices == ()
    assert problem.startswith("p.json")
    assert said in problem


@pytest.mark.parametrize("sources", [["the bill"], {"b": 3}, None])
def test_bad_sources_cost_no_price(sources):
    """A table of keys that is no object of titles is reported; the rows count, with the key as their source."""
    row = {"device": "l4", "provider": "us", "usd_per_hour": 1, "source": "b"}
    (price,), (problem,) = prices_from_json(json.dumps({"prices": [row], "sources": sources}), "p.json", KNOWN)
    assert (price.device, price.source) == ("l4", "b")
    assert problem.startswith("p.json: wanted `sources` as an object of titles by key, found")


def test_the_file_of_the_documentation_is_one():
    """The example of docs/devices.md is read without a word."""
    page = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```csv\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    prices, problems = prices_from_csv(text, "p.csv", KNOWN)
    assert problems == ()
    assert [price.usd_per_hour for price in prices] == [1.9, 0.6, 0.35]


def test_files_by_their_ending(tmp_path):
    """CSV with a byte order mark, as spreadsheets write it; JSON otherwise; a file that is not there is reported."""
    (tmp_path / "p.csv").write_text(HEADER + "l4,us,1,,,,\n", encoding="utf-8-sig")
    (tmp_path / "p.json").write_text('[{"device": "l4", "provider": "us", "usd_per_hour": 1}]')
    for name in ("p.csv", "p.json"):
        assert [price.device for price in read_prices(tmp_path / name, KNOWN)[0]] == ["l4"]
    prices, (problem,) = read_prices(tmp_path / "none.csv", KNOWN)
    assert prices == ()
    assert "none.csv: cannot be read" in problem
