"""Settings of the site. `make docs` builds it; nothing in it is fetched from a network."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[0:0] = [str(DOCS.parent), str(DOCS / "_ext")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fedlightning  # noqa: E402  after the path is set

project = "FedLightning"
author = copyright = "The FedLightning authors"
release = version = fedlightning.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "generated_pages",  # reference/: a page a method, the API, commands, configuration keys
    "mathml",  # formulas without a script
    "llms",  # llms.txt and llms-full.txt
]
exclude_patterns = ["_build", "_ext", "tutorials/README.rst", "Thumbs.db"]
highlight_language = "text"  # a block without a language is a terminal's
default_role = "literal"  # our docstrings write code in single backticks, as Markdown does
nitpicky = False
suppress_warnings = ["myst.xref_ambiguous"]
python_maximum_signature_line_length = 90
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Shapes", "params_style")]
napoleon_use_ivar = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
intersphinx_disabled_reftypes = ["*"]

warnings.filterwarnings("ignore", message=".*does not have many workers.*")
sphinx_gallery_conf = {
    "examples_dirs": str(DOCS.parent / "examples" / "tutorials"),
    "gallery_dirs": "tutorials",
    "filename_pattern": r"\.py$",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "min_reported_time": 25,
    "show_memory": False,
    "write_computation_times": False,  # junit has them; the page would fetch scripts
    "show_signature": False,
    "within_subsection_order": "FileNameSortKey",
    "remove_config_comments": True,
    "backreferences_dir": "tutorials/backreferences",
    "doc_module": ("fedlightning",),
    "junit": str(DOCS / "_build" / "gallery.xml"),
    "reset_modules": ("matplotlib",),
}

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "FedLightning"
html_logo = html_favicon = "_static/logo.svg"
html_search_scorer = str(DOCS / "_ext/scorer.js")  # read from where the build is started
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "FedLightning", "alt_text": ""},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_sidebars = {"index": [], "choose": []}
