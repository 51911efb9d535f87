"""A headless Chromium that clicks like a person; skipped, with the reason, where there is none."""

from __future__ import annotations

import atexit
import base64
import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--window-size=1500,1050",
    "--process-per-site", "--force-prefers-reduced-motion",  # each window and frame costs CPU time
)  # fmt: skip

WIDTHS = {"": 1280, "-phone": 390}  # suffix of a picture → CSS pixels

_open: list[Any] = []  # this process's: a start takes 2 s of CPU time


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Yield a Selenium driver with a window of its own (tests of the xdist group "browser")."""
    if not _open:
        _open.append(_started())
    (browser,) = _open
    first = browser.current_window_handle
    browser.switch_to.new_window("window")
    browser.get_log("browser")  # forgets what pages of other tests logged
    try:
        yield browser
    finally:
        try:
            browser.close()
            browser.switch_to.window(first)
        except Exception:
            _quit()
            raise


@atexit.register
def _quit() -> None:
    while _open:
        _open.pop().quit()


def _started() -> Any:
    """Start one; ``PACELINE_REQUIRE=services`` turns the skip into a failure."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not program or not driver:
        reason = "needs chromium and chromedriver (make setup-services)"
        if "services" in os.environ.get("PACELINE_REQUIRE", "").split(","):
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = program
    for each in QUIET:
        options.add_argument(each)
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_page_load_timeout(60)
    return browser


def click(browser: Any, xpath: str, timeout_s: float = 30) -> None:
    """Click the first element at ``xpath`` once it can be clicked."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.expected_conditions import element_to_be_clickable
    from selenium.webdriver.support.wait import WebDriverWait

    def clicked(browser: Any) -> bool:
        if found := element_to_be_clickable((By.XPATH, xpath))(browser):
            found.click()
        return bool(found)

    # A page that draws itself anew replaces elements: one that was found is looked up again.
    stale = [StaleElementReferenceException]
    WebDriverWait(browser, timeout_s, ignored_exceptions=stale).until(clicked)


def see(browser: Any, xpath: str, timeout_s: float = 30) -> Any:
    """Return the first visible element at ``xpath``."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.expected_conditions import visibility_of_element_located
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, timeout_s).until(visibility_of_element_located((By.XPATH, xpath)))


def resize(browser: Any, width: int) -> None:
    """Give the window another width (CSS pixels); a narrow one is a phone's."""
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def send_credentials(browser: Any, user_and_password: str) -> None:
    """Send ``user:password`` with every request, as a person's browser does after asking once."""
    secret = base64.b64encode(user_and_password.encode()).decode()
    browser.execute_cdp_cmd("Network.enable", {})
    headers = {"headers": {"Authorization": f"Basic {secret}"}}
    browser.execute_cdp_cmd("Network.setExtraHTTPHeaders", headers)


def keep(browser: Any, name: str) -> None:
    """Save a screenshot where ``PACELINE_SCREENSHOTS`` says (`make screenshots`)."""
    if directory := os.environ.get("PACELINE_SCREENSHOTS"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(directory) / f"{name}.png"))


def keep_each_width(browser: Any, name: str) -> None:
    """Save screenshots at the width of a phone and of a desk, which the window keeps."""
    for suffix, width in reversed(WIDTHS.items()):
        resize(browser, width)
        time.sleep(3)  # the graph of tasks draws itself
        keep(browser, name + suffix)
