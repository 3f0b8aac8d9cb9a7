"""Pages of every kind, for Node.js and for a browser."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.viewer.samples import shown, write_pages


@pytest.fixture(scope="package")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a page of each kind of run and dataset. Beside it lies its data, as JSON."""
    written = write_pages(tmp_path_factory.mktemp("pages"))
    for page in written.values():
        page.with_suffix(".json").write_text(json.dumps(shown(page)))
    return written


class Browser:
    """Chromium without a window and without a network."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, page: Path, width: int = 1400, height: int = 1000) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self._driver.get(f"file://{page}")
        self.wait("document.documentElement.dataset.ready === 'true'")

    def run(self, script: str, *arguments: object) -> Any:
        return self._driver.execute_script(script, *arguments)

    def get(self, expression: str) -> Any:
        return self.run(f"return {expression}")

    def wait(self, condition: str, seconds: int = 20) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self._driver, seconds, 0.02).until(lambda _: self.get(condition), condition)

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
        names = self.get("performance.getEntriesByType('resource').map((entry) => entry.name)")
        return [name for name in names if not name.startswith("blob:")]  # what the page made itself


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
