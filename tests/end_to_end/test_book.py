"""The book of `make book`, opened as a file, without a server or a network, in Chromium: a phone and a desk."""

from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from browser import NOTEBOOKS, ROOT, SHOTS, chromium, console_errors, needs_chromium, requests

BOOK = ROOT / "book" / "html"
SOURCES = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
TEXTS = [path.relative_to(ROOT).with_suffix("") for path in SOURCES]
PAGES = [BOOK / f"{name}.html" for name in ("index", "search", *TEXTS)]
SOURCES_OF_PAGES = (*NOTEBOOKS, *sorted((ROOT / "notebooks" / "appendix").glob("*.ipynb")))
PAGES += [BOOK / path.relative_to(ROOT).with_suffix(".html") for path in SOURCES_OF_PAGES]
SIZES = {"desk": (1280, 1000), "phone": (390, 844)}  # a window's width and height
no_book = pytest.mark.skipif(not BOOK.exists(), reason="there is no book: make book")
pytestmark = [needs_chromium, no_book]

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
    unmade: all("article p").filter((text) => text.textContent.includes("|---|")).map((text) => text.textContent),
    still: all("figure script").filter((script) => !script.parentElement.querySelector("svg, input")).length,
}));
"""


@pytest.fixture(scope="module", params=SIZES)
def pages(request):
    """What a browser of one size makes of every page, its console's errors and its requests; a screenshot of each."""
    seen = {}
    SHOTS.mkdir(parents=True, exist_ok=True)
    with chromium(*SIZES[request.param]) as driver:
        if request.param == "phone":  # a window cannot be so narrow
            metrics = dict(zip(("width", "height"), SIZES["phone"], strict=True))
            metrics |= {"deviceScaleFactor": 2, "mobile": True}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for path in PAGES:
            driver.get(path.as_uri())
            seen[path] = driver.execute_async_script(LOOK)
            seen[path] |= {"errors": console_errors(driver), "requests": requests(driver)}
            driver.save_screenshot(str(SHOTS / f"{request.param}_{path.stem}.png"))
    return seen


@pytest.mark.parametrize(
    "wrong", ["errors", "misread", "fonts", "overflow", "mute", "unmade", "still"]
)
def test_no_page_has(wrong, pages):
    """Errors in its console, formulas or fonts that fail, more width than the window, an image without words for it, a
    table left as Markdown, or a picture that its script did not bring to life.
    """
    assert {path.name: page[wrong] for path, page in pages.items() if page[wrong]} == {}


def test_every_page_needs_the_book_alone_and_no_network(pages):
    asked = set().union(*(page["requests"] for page in pages.values()))
    own = {address for address in asked if address.startswith((BOOK.as_uri(), "data:", "blob:"))}
    assert len(own) > len(PAGES) and asked == own


def test_every_image_is_there_and_every_formula_is_drawn(pages):
    assert sum(len(page["images"]) for page in pages.values()) > len(NOTEBOOKS)
    images = [image for page in pages.values() for image in page["images"]]
    assert {source for source, width in images if not width} == set()
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
const done = arguments[0], pause = () => new Promise((wake) => setTimeout(wake, 400));
const figures = [...document.querySelectorAll("figure")].filter((figure) => figure.querySelector("input"));
Promise.all(figures.map(async (figure) => {
    const changed = [];
    for (const input of figure.querySelectorAll("input")) {
        const before = figure.innerHTML;
        input.value = input.value === input.min ? input.max : input.min;
        input.dispatchEvent(new Event("input", {bubbles: true}));
        await pause();
        changed.push(figure.innerHTML !== before);
    }
    for (const button of figure.querySelectorAll("button")) {
        const before = figure.innerHTML;
        button.click();
        await pause();
        changed.push(figure.innerHTML !== before);
    }
    return changed;
})).then(done, (error) => done(String(error)));
"""


# How many pictures of a page have controls, and how many of these leave the picture as it is: a button that leads
# back to its start.
@pytest.mark.parametrize(
    ("page", "pictures", "at_rest"),
    [("00_quickstart", 2, 1), ("06_attention_operation", 1, 0)],
)
def test_every_slider_and_button_moves_its_picture(page, pictures, at_rest):
    with chromium() as driver:
        driver.get((BOOK / "notebooks" / f"{page}.html").as_uri())
        driver.implicitly_wait(2)
        driver.find_elements("css selector", "figure input")
        moved = driver.execute_async_script(PLAY)
        assert console_errors(driver) == []
    assert len(moved) == pictures
    assert all(any(changed) for changed in moved)
    assert sum(changed.count(False) for changed in moved) <= at_rest


DESCEND = """
    const figure = [...document.querySelectorAll("figure")].find((one) => one.querySelector("input"));
    const press = (name) => [...figure.querySelectorAll("button")].find(
        ({ textContent }) => textContent === name).click();
    // Of the output with k*: the last number of the table.
    const length = () => Number([...figure.querySelectorAll("output")].at(-1).textContent);
    const lengths = [length()];
    press("all alike");
    for (let step = 0; step <= 500; step++) {
        lengths.push(length());
        press("one step of descent");
    }
    return lengths;
"""


def test_steps_of_descent_in_06_lead_to_where_the_page_says_that_they_end():
    with chromium() as driver:
        driver.get((BOOK / "notebooks" / "06_attention_operation.html").as_uri())
        driver.implicitly_wait(2)
        driver.find_elements("css selector", "figure input")
        end, *lengths = driver.execute_script(DESCEND)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 3 * end and lengths[-1] < end + 0.03
