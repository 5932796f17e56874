"""The page in a real browser: nothing in the console, nothing asked of the network, nothing wider than the screen."""

from __future__ import annotations

import dataclasses

import pytest

from moetune.reporting import build_report
from moetune.store import Provenance, Store
from tests.reporting import made_up
from tests.reporting.browser import Browser, find_chromium

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")

_PROBLEMS = {"Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"}
_WIDE = """
[...document.querySelectorAll('body *')]
  .filter(e => !e.closest('.scroll, pre, .glyphs') && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + ' ' + e.textContent.slice(0, 40))
"""
_PICTURES = """
[...document.querySelectorAll('figure svg')]
  .filter(e => e.getBoundingClientRect().width > 200 && e.getBoundingClientRect().height > 100
    && e.querySelectorAll('path, use').length > 50).length
"""
_UNRESOLVED = """
[...document.querySelectorAll('use')].filter(e => !document.querySelector(e.getAttribute('href'))).length
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two tables, one of them with a hostile device name, trials for one, a broken third."""
    folder = tmp_path_factory.mktemp("report")
    made_up.write(made_up.table(), folder / "in" / "a.json")
    device = dataclasses.replace(made_up.H200, name="<script>console.log(1)</script>" + "W" * 150)
    made_up.write(made_up.table(made_up.QWEN3_30B, device, counted=False, backend="replay"), folder / "in" / "b.json")
    (folder / "in" / ("c" * 120 + ".json")).write_text("<img src=http://example.invalid/x>")
    provenance = Provenance(
        backend="cuda",
        shape=made_up.DEFAULT_SHAPE,
        device=made_up.H200,
        kernels_sha256="0",
        triton="3.6.0",
        torch="2.11.0",
        driver="580",
    )
    with Store(folder / "trials.sqlite") as store:
        run = store.begin(provenance, "made up")
        for trial in made_up.trials():
            run.record(trial)
    return build_report([folder / "in"], [folder / "trials.sqlite"], folder / "out").page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Browser(str(CHROMIUM), tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1280])
def test_the_page_is_quiet_complete_and_no_wider_than_the_screen(browser, page, width, dark):
    browser.open(page, width, dark=dark)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(_WIDE) == []
    assert browser.evaluate(_PICTURES) == 7
    assert browser.evaluate(_UNRESOLVED) == 0
    assert [event for event in browser.events if event["method"] in _PROBLEMS] == []
    asked = [
        event["params"]["request"]["url"] for event in browser.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [page.absolute().as_uri()]


def test_dark_and_light_differ_in_page_and_pictures(browser, page):
    seen = {}
    for dark in (False, True):
        browser.open(page, 800, dark=dark)
        text = "getComputedStyle(document.querySelector('figure svg g[style*=\"fill\"]')).fill"
        seen[dark] = (browser.evaluate("getComputedStyle(document.body).backgroundColor"), browser.evaluate(text))
    assert seen[False][0] != seen[True][0]
    assert seen[False][1] != seen[True][1]


def test_wide_tables_scroll_inside_their_own_box_on_a_phone(browser, page):
    browser.open(page, 360)
    boxes = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 20).length"
    assert browser.evaluate(boxes) >= 8


def test_on_a_desk_every_column_is_in_sight(browser, page):
    browser.open(page, 1280)
    cut = "[...document.querySelectorAll('section .scroll')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)"
    assert browser.evaluate("document.querySelectorAll('section .scroll').length") > 10
    assert browser.evaluate(cut) == []
