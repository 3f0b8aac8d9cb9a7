"""The page: its modules in Node.js, and what only a browser shows, without a network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.viewer.conftest import Browser
from tests.viewer.samples import EVIL

TESTS = Path(__file__).parent / "page"


def test_the_modules_in_node(pages: dict[str, Path]) -> None:
    node = shutil.which("node", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if node is None:
        pytest.skip("Node.js isn't installed")
    environment = os.environ | {"PAGES": str(pages["run"].parent)}
    command = [node, "--test", *map(str, sorted(TESTS.glob("*.test.mjs")))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_buttons_and_keys_of_the_page(browser: Browser, pages: dict[str, Path]) -> None:
    """A name that looks like a script is text."""
    from selenium.webdriver import Keys

    browser.open(pages["run"])
    assert browser.text("#title").endswith(" / run") and "seed 0" in browser.text("#facts")
    browser.click("#theme")
    assert browser.get("document.documentElement.dataset.theme") == "dark"
    browser.click("#help")
    assert browser.get("document.querySelector('#keys').open")
    browser.click("#close")
    assert not browser.get("document.querySelector('#keys').open")
    browser.click("#last")
    browser.run("document.querySelector('#slider').focus()")
    browser.keys(Keys.ARROW_LEFT)
    assert "step 3 of 4" in browser.text("#said"), "the arrow must move one step, not one for the slider and another"
    browser.open(pages["run"])
    browser.keys("k", "k", "k")
    assert browser.get("document.title") == "run"
    assert EVIL in browser.get("document.querySelector('#verdict').textContent")
    assert browser.get("document.querySelectorAll('img').length") == 0


SMALL = (
    "[...document.querySelectorAll('button, select, input')].filter((e) => e.checkVisibility()).filter((e) => "
    "{ const r = e.getBoundingClientRect(); return r.height < 39.5 || r.width < 39.5 }).map((e) => e.id || e.outerHTML)"
)
UNNAMED = (
    "[...document.querySelectorAll('button, select, input, canvas[role=img]')].filter((e) => "
    "!(e.ariaLabel || e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)"
)


def test_a_phone_shows_every_view(browser: Browser, pages: dict[str, Path]) -> None:
    """Long keys leave room for the runs."""
    for name, page in pages.items():
        browser.open(page, width=360, height=740)
        for tab in browser.get("[...document.querySelectorAll('[role=tab]')].map((tab) => tab.id)"):
            browser.run(f"document.querySelector('#{tab}').click()")
            assert browser.get("document.documentElement.scrollWidth - window.innerWidth") == 0, (name, tab)
            assert browser.get(SMALL) == [], (name, tab)
            assert browser.get(UNNAMED) == [], (name, tab)
    browser.open(pages["mixed"], width=360, height=740)
    names = "[...document.querySelectorAll('.scroll tr > :first-child')].map((e) => e.getBoundingClientRect().width)"
    assert max(browser.get(names)) < 150, "the columns of the runs are hidden"
    browser.run("document.querySelector('#tab-curves').click()")
    keys = "document.querySelector('#curve .keys')"
    assert browser.get(f"{keys}.scrollWidth - {keys}.clientWidth") == 0, "the legend is wider than its card"


def test_the_pointer_reads_curves_and_chooses_a_step(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"])
    browser.click("#errors svg")  # in its middle
    assert "step 2 of 4" in browser.text("#said") or "step 3 of 4" in browser.text("#said")
    browser.click("#tab-curves")
    browser.click("#curve svg")
    assert 220 <= int(browser.text("#curve .tip").split()[1]) <= 280, "the middle is step 250"
