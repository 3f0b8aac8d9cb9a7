"""The page: its modules in Node.js, and what only a browser shows, without a network."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


class Browser:
    """Chromium without a window and without a network."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, page: Path, width: int = 1400, height: int = 1000) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self._driver.get(f"file://{page}")
        self.wait("document.documentElement.dataset.ready === 'true'")

    def run(self, script: str) -> Any:
        return self._driver.execute_script(script)

    def get(self, expression: str) -> Any:
        return self.run(f"return {expression}")

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self._driver, 20, 0.02).until(lambda _: self.get(condition), condition)

    def text(self, selector: str) -> str:
        return str(self.get(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Click on an element. Selenium refuses to click on an invisible element."""
        from selenium.webdriver.common.by import By

        self._driver.find_element(By.CSS_SELECTOR, selector).click()

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self._driver).send_keys(*keys).perform()

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requests(self) -> list[str]:
        return list(self.get("performance.getEntriesByType('resource').map((entry) => entry.name)"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium isn't installed")
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("chromium and chromedriver (Debian: chromium, chromium-driver) aren't installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield Browser(driver)
    driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Return a browser. A test must leave no error in the console and fetch nothing."""
    chromium.errors()
    yield chromium
    assert chromium.errors() == []
    assert chromium.requests() == []


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
