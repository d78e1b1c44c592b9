"""Settings of the documentation site: `sphinx-build -W docs docs/_build/html`."""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
# For the tutorials, which run in processes of their own.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

project = "keras_auxref"
author = "the authors of keras_auxref"
copyright = "the authors of keras_auxref"
version = release = re.search(r'^__version__ = "(.+)"', (ROOT / "keras_auxref/__init__.py").read_text(), re.M).group(1)

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "conf.py", "docstrings.py", "mathml.py", "figures", "kubernetes"]

# --------------------------------------------------------------------------------------------------------------- pages
html_theme = "furo"
html_title = f"keras_auxref {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_math_renderer = "mathml"
html_show_copyright = False
html_theme_options = {
    "navigation_with_keys": True,
    "source_repository": re.search(r'^Source = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M).group(1),
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div:not(.formula):not(.output) > div.highlight > pre"

# ----------------------------------------------------------------------------------------------------------- tutorials
# Scripts in the percent format: `python docs/tutorials/recall.py` runs one, and the site shows it with its output.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "docs" / "_build" / ".jupyter_cache")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"

# ----------------------------------------------------------------------------------------------------------- reference
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True}
nitpick_ignore_regex = [("py:class", r"keras_auxref\.(ops\.proof\..*|typing\.Tensor|typing\.Shape)")]
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Call arguments", "params_style"), "Output", "Reference"]


def setup(app):
    """Docstrings are plain text with formulas and Markdown tables: makes reStructuredText of them. And MathML of formulas."""
    sys.path.insert(0, str(Path(__file__).parent))
    import docstrings
    import mathml

    app.add_html_math_renderer("mathml", inline_renderers=(mathml.inline, None), block_renderers=(mathml.block, None))
    app.connect("autodoc-process-docstring", docstrings.process, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", docstrings.signature)
    app.connect("autodoc-skip-member", docstrings.skip)
