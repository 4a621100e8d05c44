"""A page in headless Chromium, for tests that skip where it, its driver or selenium is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def open_browser() -> Iterator[Any]:
    """A fixture's generator: the driver, which it quits at the end."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    program, driver_program = (shutil.which(x) for x in ("chromium", "chromedriver"))
    if not program or not driver_program:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for x in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(x)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_program))
    yield driver
    driver.quit()


class Page:
    """A page in the browser, once it is shown."""

    def __init__(self, browser: Any, path: Path, hash_: str = "") -> None:
        self.browser = browser
        browser.get("about:blank")
        browser.get(f"{path.as_uri()}{hash_}")
        self.wait_for("!$('main').hidden && $('event').textContent || !$('notice').hidden")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true, for 10 s at most."""
        for _ in range(500):
            if self.value(condition):
                return
            self.sleep(20)
        raise AssertionError(condition)

    def sleep(self, milliseconds: int) -> None:
        self.browser.execute_async_script(f"setTimeout(arguments[0], {milliseconds})")

    def keys(self, *keys: str) -> None:
        self.browser.switch_to.active_element.send_keys(*keys)

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        found: str = self.find(selector).text
        return found

    def value(self, script: str) -> Any:
        return self.browser.execute_script(f"return {script}")

    def theme(self, name: str) -> None:
        """Prefer the colors of the theme, light or dark, from now on."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def errors(self) -> list[str]:
        """What the page has written to the console since the last question."""
        return [x["message"] for x in self.browser.get_log("browser") if x["level"] in ("SEVERE", "WARNING")]
