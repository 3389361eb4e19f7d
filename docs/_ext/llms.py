"""`llms.txt` and `llms-full.txt` of the built site: a list of its pages, and their text, for programs that read."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

INTRODUCTION = """# FedLightning

> FedLightning trains a PyTorch Lightning module across many clients, federated or personalised, without changes to it.

The truth about methods, options and configurations is printed by the package itself: `fedlightning algorithms --json`,
`fedlightning configs schema`, `fedlightning COMMAND --help`.
"""
PARTS = {
    "start": "Start",
    "choose": "Choose a method",
    "tutorials": "Tutorials",
    "how-to": "How-to",
    "reference": "Reference",
    "explanation": "Explanation",
    "results": "Results",
    "about": "About",
}
"""First folder of a page (or its name) -> the heading that it stands under."""


def first_words(page: nodes.document) -> str:
    """Return a page's first sentence of text, which is in no table, list or note."""
    sections = (found for found in page.findall(nodes.paragraph) if isinstance(found.parent, nodes.section))
    paragraph = next((found.astext() for found in sections), "")
    return " ".join(paragraph.split()).split(". ")[0].rstrip(".:")


def write(app: Sphinx, error: Exception | None) -> None:
    """Write both files beside the pages."""
    if error is not None or app.builder.name != "html":
        return
    pages: dict[str, list[str]] = {part: [] for part in PARTS}
    listed = dict.fromkeys(PARTS, "")
    for name in sorted(app.env.found_docs):
        part = name.partition("/")[0]
        if part not in PARTS or "/api/" in name:
            continue
        title = app.env.titles[name].astext()
        words = first_words(app.env.get_doctree(name))
        listed[part] += f"- [{title}]({name}.html){words and ': ' + words}\n"
        source = Path(app.env.doc2path(name)).read_text()
        pages[part].append(f"<!-- {name} -->\n{source}")
    index = "\n".join(f"## {PARTS[part]}\n\n{lines}" for part, lines in listed.items() if lines)
    Path(app.outdir, "llms.txt").write_text(f"{INTRODUCTION}\n{index}")
    every = "\n\n".join(text for part in PARTS for text in pages[part])
    Path(app.outdir, "llms-full.txt").write_text(f"{INTRODUCTION}\n{every}")


def setup(app: Sphinx) -> dict[str, bool]:
    """Make this module an extension."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
