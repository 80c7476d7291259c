"""Settings of Sphinx for the site (.ci/book.py)."""

import configparser
import importlib.util
import shutil
from pathlib import Path

parser = configparser.ConfigParser(delimiters=["="], interpolation=None)
parser.read(Path(__file__).resolve().parent.parent.parent / "settings.ini", encoding="utf-8")
project = parser["DEFAULT"]["lib_name"]
release = parser["DEFAULT"]["version"]
copyright = parser["DEFAULT"]["copyright"]

extensions = ["myst_parser", "sphinx_design", "sphinx.ext.mathjax"]
root_doc = "index"
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses where the site is opened from a disk
html_show_sphinx = False
pygments_style = "default"
pygments_dark_style = "github-dark"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 4
mathjax_path = "mathjax/tex-chtml.js"  # MathJax 3 from the package index: no page fetches anything


def put_mathjax(app, error):
    """Copy the one script and its fonts; the package holds all of MathJax, 24 MB."""
    if error is None:
        found = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
        to = Path(app.outdir) / "_static" / "mathjax"
        for part in ("tex-chtml.js", "output/chtml/fonts", "input/tex/extensions"):
            (to / part).parent.mkdir(parents=True, exist_ok=True)
            if (found / part).is_dir():
                shutil.copytree(found / part, to / part, dirs_exist_ok=True)
            else:
                shutil.copyfile(found / part, to / part)


def folded(app, page, template, context, doctree):
    """The side bar opens only the branch of its page; furo asks for all of it, which would be a megabyte on each of hundreds of pages."""
    if "toctree" in context:
        whole = context["toctree"]
        context["toctree"] = lambda **options: whole(**options | {"collapse": True})


def setup(app):
    """Called by Sphinx."""
    app.connect("html-page-context", folded, priority=100)
    app.connect("build-finished", put_mathjax)
