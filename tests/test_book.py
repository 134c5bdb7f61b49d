"""The book of `make book`, opened as a file, without a server or a network, in headless Chromium."""

import json
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from browser import chromium, console_errors, needs_chromium, requests

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book" / "html"
SHOTS = ROOT / "build" / "screenshots"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
PAGES = [BOOK / f"{name}.html" for name in ("index", "README", "ERRATA", "CONTRIBUTING", "search")]
PAGES += [BOOK / "notebooks" / f"{path.stem}.html" for path in NOTEBOOKS]
pytestmark = [needs_chromium, pytest.mark.skipif(not BOOK.exists(), reason="there is no book: make book")]

LOOK = """
const done = arguments[0], all = (query) => [...document.querySelectorAll(query)];
const settled = window.MathJax ? MathJax.startup.promise : Promise.resolve();
settled.then(() => document.fonts.ready).then(() => done({
    ids: all("[id]").map((element) => element.id),
    links: all("a[href]").map((element) => element.href),
    images: all("img").map((image) => [image.src, image.naturalWidth]),
    figures: all(".cell_output img").length,
    formulas: all("span.math, div.math").length,
    drawn: all("mjx-container").length,
    misread: all("mjx-merror, .problematic").map((element) => element.textContent),
    fonts: [...document.fonts].filter((font) => font.status == "error").map((font) => font.family),
    overflow: document.documentElement.scrollWidth - window.innerWidth,
}));
"""


@pytest.fixture(scope="module")
def driver():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(driver):
    """What the browser makes of every page, its console's errors and its requests; and a screenshot of each."""
    seen = {}
    SHOTS.mkdir(parents=True, exist_ok=True)
    for path in PAGES:
        driver.get(path.as_uri())
        seen[path] = driver.execute_async_script(LOOK)
        seen[path] |= {"errors": console_errors(driver), "requests": requests(driver)}
        driver.save_screenshot(str(SHOTS / f"book_{path.stem}.png"))
    return seen


def everywhere(pages, key):
    """What is wrong, page by page, of a list that should be empty."""
    return {path.name: page[key] for path, page in pages.items() if page[key]}


def test_the_console_of_no_page_has_an_error(pages):
    assert everywhere(pages, "errors") == {}


def test_every_page_needs_the_book_alone_and_no_network(pages):
    asked = set().union(*(page["requests"] for page in pages.values()))
    own = {address for address in asked if address.startswith((BOOK.as_uri(), "data:", "blob:"))}
    assert len(own) > len(PAGES) and asked == own


def test_every_image_is_there(pages):
    assert sum(len(page["images"]) for page in pages.values()) > len(NOTEBOOKS)
    assert {source for page in pages.values() for source, width in page["images"] if not width} == set()


def test_every_formula_is_drawn(pages):
    assert sum(page["drawn"] for page in pages.values()) > 0
    assert {path.name: page["drawn"] for path, page in pages.items()} == {
        path.name: page["formulas"] for path, page in pages.items()
    }
    assert everywhere(pages, "misread") == {} and everywhere(pages, "fonts") == {}


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


def test_no_page_is_wider_than_the_window(pages):
    assert {path.name: page["overflow"] for path, page in pages.items() if page["overflow"] > 0} == {}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebooks_page_has_all_its_figures(path, pages):
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pages[BOOK / "notebooks" / f"{path.stem}.html"]["figures"] == figures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_solutions_are_folded_and_open_when_clicked(path, driver):
    driver.get((BOOK / "notebooks" / f"{path.stem}.html").as_uri())
    folded = [item for item in driver.find_elements("tag name", "details") if "Solutions" in item.text]
    inside = [item for fold in folded for item in fold.find_elements("css selector", "li, p, pre")]
    assert inside and not any(item.is_displayed() for item in inside)
    for fold in folded:
        fold.find_element("tag name", "summary").click()
    assert all(item.is_displayed() for item in inside)


def test_the_search_finds_a_word_of_a_notebook(driver):
    driver.get((BOOK / "search.html").as_uri() + "?q=quickstart")
    driver.implicitly_wait(30)
    links = driver.find_elements("css selector", "#search-results li a")
    assert any(urlparse(link.get_attribute("href")).path.endswith("00_quickstart.html") for link in links)
    assert console_errors(driver) == []


def test_no_file_names_the_folder_it_was_built_in():
    texts = [path for path in BOOK.rglob("*") if path.suffix in (".html", ".js", ".txt", ".md", ".ipynb")]
    assert len(texts) > len(PAGES)
    assert [path.name for path in texts if str(ROOT) in path.read_text(errors="replace")] == []
