"""In headless Chromium: the book of `make book`, without a network, at a desk and on a phone; notebooks in JupyterLab.

`make browser` runs it. The book is opened as files, the notebooks are copies. Screenshots go to build/screenshots.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.parse import unquote, urldefrag, urlparse
from urllib.request import urlopen

import pytest

pytest.importorskip("selenium", reason="selenium is not installed here: make browser")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "build" / "screenshots"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not installed")
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
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return {one["request"]["url"] for one in sent if not one["documentURL"].startswith("chrome")}


# ---- the book

BOOK = ROOT / "book" / "html"
TEXTS = [path.relative_to(ROOT).with_suffix("") for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))]
PAGES = [BOOK / f"{name}.html" for name in ("index", "search", *TEXTS)]
PAGES += [BOOK / "notebooks" / f"{path.stem}.html" for path in NOTEBOOKS]
SIZES = {"desk": (1280, 1000), "phone": (390, 844)}  # a window's width and height

LOOK = """
const done = arguments[0], all = (query) => [...document.querySelectorAll(query)];
const loaded = new Promise((wake) => document.readyState === "complete" ? wake() : addEventListener("load", wake));
const drawn = () => window.MathJax && MathJax.startup.promise;
const pause = () => new Promise((wake) => setTimeout(wake, 200));
loaded.then(drawn).then(() => document.fonts.ready).then(pause).then(() => done({
    ids: all("[id]").map((element) => element.id),
    links: all("a[href]").map((element) => element.href),
    images: all("img").map((image) => [image.src.slice(0, 80), image.naturalWidth]),
    mute: all("article img").filter((image) => !image.alt.trim()).map((image) => image.src.slice(0, 80)),
    formulas: all("span.math, div.math").length,
    drawn: all("mjx-container").length,
    misread: all("mjx-merror, .problematic").map((element) => element.textContent),
    fonts: [...document.fonts].filter((font) => font.status == "error").map((font) => font.family),
    overflow: Math.max(0, document.documentElement.scrollWidth - window.innerWidth),
    still: all("figure script").filter((script) => !script.parentElement.querySelector("svg")).length,
}));
"""


@pytest.fixture(scope="module", params=SIZES)
def pages(request):
    """What a browser of one size makes of every page, its console's errors and its requests; a screenshot of each."""
    if not BOOK.exists():
        pytest.skip("there is no book: make book")
    seen = {}
    SHOTS.mkdir(parents=True, exist_ok=True)
    with chromium(*SIZES[request.param]) as driver:
        if request.param == "phone":  # a window cannot be so narrow
            metrics = dict(zip(("width", "height"), SIZES["phone"], strict=True), deviceScaleFactor=2, mobile=True)
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for path in PAGES:
            driver.get(path.as_uri())
            seen[path] = driver.execute_async_script(LOOK)
            seen[path] |= {"errors": console_errors(driver), "requests": requests(driver)}
            driver.save_screenshot(str(SHOTS / f"{request.param}_{path.stem}.png"))
    return seen


@pytest.fixture(scope="module")
def driver():
    if not BOOK.exists():
        pytest.skip("there is no book: make book")
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("wrong", ["errors", "misread", "fonts", "overflow", "mute", "still"])
def test_no_page_has(wrong, pages):
    """Errors in its console, formulas or fonts that fail, more width than the window, an image without words for it, or
    a picture that its script did not bring to life.
    """
    assert {path.name: page[wrong] for path, page in pages.items() if page[wrong]} == {}


def test_every_page_needs_the_book_alone_and_no_network(pages):
    asked = set().union(*(page["requests"] for page in pages.values()))
    own = {address for address in asked if address.startswith((BOOK.as_uri(), "data:", "blob:"))}
    assert len(own) > len(PAGES) and asked == own


def test_every_image_is_there_and_every_formula_is_drawn(pages):
    assert sum(len(page["images"]) for page in pages.values()) > len(NOTEBOOKS)
    assert {source for page in pages.values() for source, width in page["images"] if not width} == set()
    assert sum(page["drawn"] for page in pages.values()) > 0
    assert [path.name for path, page in pages.items() if page["drawn"] != page["formulas"]] == []


def test_every_link_inside_the_book_leads_somewhere(pages):
    broken = set()
    for path, page in pages.items():
        for link in page["links"]:
            address, anchor = urldefrag(link)
            if urlparse(address).scheme in ("http", "https", "mailto"):
                continue
            target = Path(unquote(urlparse(address).path))
            if BOOK not in target.parents or not target.is_file():
                broken.add((path.name, link))
            elif anchor and target in pages and unquote(anchor) not in pages[target]["ids"]:
                broken.add((path.name, link))
    assert broken == set()


PLAY = """
const done = arguments[0];
Promise.all([...document.querySelectorAll("figure .controls")].map(async (controls) => {
    const svg = controls.parentElement.querySelector("svg"), before = svg.innerHTML, changed = [];
    for (const input of controls.querySelectorAll("input")) {
        const start = svg.innerHTML;
        input.value = input.value === input.min ? input.max : input.min;
        input.dispatchEvent(new Event("input"));
        changed.push(svg.innerHTML !== start);
    }
    for (const button of controls.querySelectorAll("button")) {
        button.click();
        await new Promise((wake) => setTimeout(wake, 400));
        changed.push(svg.innerHTML !== before);
    }
    return changed;
})).then(done);
"""


def test_every_slider_and_button_of_the_first_notebook_moves_its_picture(driver):
    driver.get((BOOK / "notebooks" / "00_quickstart.html").as_uri())
    driver.implicitly_wait(2)
    driver.find_elements("css selector", "figure .controls")
    moved = driver.execute_async_script(PLAY)
    assert len(moved) >= 4
    assert all(any(changed) for changed in moved)
    assert sum(changed.count(False) for changed in moved) <= 1  # "nothing matches" is how the logits start
    assert console_errors(driver) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_solutions_are_folded_and_open_when_clicked(path, driver):
    driver.get((BOOK / "notebooks" / f"{path.stem}.html").as_uri())
    folded = driver.find_elements("xpath", "//details[summary[contains(., 'olution')]]")  # whatever is painted by then
    inside = [item for fold in folded for item in fold.find_elements("css selector", "li, p, pre")]
    assert inside and not any(item.is_displayed() for item in inside)
    for fold in folded:
        fold.find_element("tag name", "summary").click()
    assert all(item.is_displayed() for item in inside)


# ---- JupyterLab

LAB = ROOT / ".venv" / "bin" / "jupyter-lab"
SECONDS = 900  # for one notebook: 00 trains a small model, on a busy machine too

OPENED = """
const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
const kernel = panel && panel.sessionContext && panel.sessionContext.session && panel.sessionContext.session.kernel;
return Boolean(kernel && kernel.status === "idle" && panel.content.widgets.length);
"""
RUN_ALL = """
const done = arguments[0], app = window.jupyterapp;
app.commands.execute("notebook:run-all-cells").then(async () => {
    const panel = app.shell.currentWidget;
    while (panel.sessionContext.session.kernel.status !== "idle") await new Promise((wake) => setTimeout(wake, 200));
    const cells = panel.content.widgets, code = cells.filter((cell) => cell.model.type === "code");
    const live = code.find((cell) => JSON.stringify(cell.model.outputs.toJSON()).includes("document.currentScript"));
    if (live) await panel.content.scrollToCell(live, "start");
    await new Promise((wake) => setTimeout(wake, 2000));
    const answers = !live || Boolean(live.node.querySelector("figure .controls"));
    done(code.map((cell) => ({
        answers,
        id: cell.model.id,
        ran: cell.model.executionCount !== null,
        errors: cell.model.outputs.toJSON().filter((output) => output.output_type === "error"),
    })));
}, (error) => done(String(error)));
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab on copies of the notebooks, with what opens it."""
    if not LAB.exists():
        pytest.skip("there is no JupyterLab in .venv: make run")
    folder = tmp_path_factory.mktemp("lab")
    for path in NOTEBOOKS:
        shutil.copy(path, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, state = secrets.token_hex(16), tmp_path_factory.mktemp("jupyter")
    command = [str(LAB), "--no-browser", "--allow-root", f"--port={port}", f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    environment = os.environ | dict.fromkeys(folders, str(state))
    with open(state / "log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _second in range(120):
            try:
                urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=5)
                break
            except URLError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?reset&token={token}"
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_all_cells_run_in_jupyterlab(path, lab):
    before = path.read_bytes()
    with chromium(1400, 1000) as driver:
        driver.set_script_timeout(SECONDS)
        driver.get(lab.format(path.name))
        deadline = time.monotonic() + SECONDS
        while not driver.execute_script(OPENED):
            assert time.monotonic() < deadline, "JupyterLab did not open the notebook with a kernel"
            time.sleep(0.5)
        cells = driver.execute_async_script(RUN_ALL)
        SHOTS.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(SHOTS / f"lab_{path.stem}.png"))
    assert isinstance(cells, list), cells
    assert [cell for cell in cells if cell["errors"] or not (cell["ran"] and cell["answers"])] == []
    assert path.read_bytes() == before
