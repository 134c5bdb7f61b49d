"""The book: README and the notebooks as they were committed, nothing executed. Built by `make book`."""

project = "When attention sink emerges"
author = "The sinkutils authors"
extensions = ["myst_nb", "sphinx_external_toc", "sphinx-mathjax-offline"]
external_toc_path = "docs/toc.yml"
include_patterns = ["*.md", "docs/*.md", "notebooks/*.ipynb", "notebooks/appendix/*.ipynb"]
exclude_patterns = [".*", "book", "build", "data"]  # not looked through: they are large

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "gfm"  # tables: those of the ledger at the end of each page
myst_enable_extensions = ["dollarmath", "html_image", "attrs_inline"]
myst_heading_anchors = 3
# The ledger's rows have their anchors in a table of HTML, which myst does not look through. That
# every link leads somewhere is what tests/end_to_end/test_book.py asks a browser.
suppress_warnings = ["myst.xref_missing"]

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["static"]
html_css_files = ["book.css"]
html_use_index = False
html_show_search_summary = (
    False  # it would fetch the pages found, which a browser refuses to a file
)
html_context = {"default_mode": "auto"}
html_theme_options = {"show_toc_level": 2, "home_page_in_toc": True, "navbar_persistent": []}


def link_to_pages(app, page, template, context, doctree):
    """A cell's output links to a notebook; in the book that is a page."""
    if "body" in context:
        for end in ("#", '"'):  # of a link to a section, and to a page
            context["body"] = context["body"].replace(f".ipynb{end}", f".html{end}")


def setup(app):
    app.connect("html-page-context", link_to_pages)
