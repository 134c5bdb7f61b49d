"""Headless Chromium for the tests that need one: `make browser`."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed here: make browser")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "build" / "screenshots"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
missing = "chromium or chromedriver is not installed"
needs_chromium = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=missing)
# Everything Chromium would do over the network of its own accord is off.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
).split()


@contextmanager
def chromium(width: int = 1280, height: int = 1000) -> Iterator[webdriver.Chrome]:
    """A Chromium with an empty profile, which keeps what its console says and what it asks for."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        driver.set_script_timeout(120)
        # Without a window no page has the focus, and JupyterLab's current notebook is the one that has it.
        driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        try:
            yield driver
        finally:
            driver.quit()


def console_errors(driver: webdriver.Chrome) -> list[str]:
    """What the console has called an error since it was last asked."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def requests(driver: webdriver.Chrome) -> set[str]:
    """The addresses that pages have asked for since it was last asked here, without those of Chromium's own new tab."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requests = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    sent = requests
    return {one["request"]["url"] for one in sent if not one["documentURL"].startswith("chrome")}
