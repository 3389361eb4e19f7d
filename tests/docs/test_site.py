"""The built site in a browser: pages fit, are legible in both colours, fetch nothing, and search finds.

`make test-docs` builds the site and runs this; without a built site, or without Chromium, it is skipped.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

SITE = Path(__file__).resolve().parents[2] / "docs/_build/html"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = (
    "index.html",
    "choose.html",
    "start/your_module.html",
    "start/first_federation.html",
    "how-to/deploy.html",
    "how-to/faq.html",
    "reference/methods/fenda.html",
    "reference/configuration_keys.html",
    "reference/api/fedlightning/FederatedTrainer.html",
    "results/published.html",
    "tutorials/02_personalise.html",
)
WIDTHS = (1440, 390)
PROBE = """<body><iframe src="/{page}" style="width:{width}px;height:900px;border:0"></iframe><script>
onload = () => setTimeout(() => {{
  const inside = document.querySelector("iframe").contentWindow, page = inside.document
  const colours = getComputedStyle(page.body), article = page.querySelector("article") || page.body
  document.title = JSON.stringify({{
    wide: page.documentElement.scrollWidth, theme: page.documentElement.dataset.theme,
    text: getComputedStyle(article).color, ground: colours.backgroundColor, words: article.innerText.length,
    fetched: inside.performance.getEntriesByType("resource").map(entry => entry.name),
    unloaded: [...page.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
    found: [...page.querySelectorAll("ul.search > li > a")].map(link => link.getAttribute("href")),
    cut: [...page.querySelectorAll("article pre, article table")].filter(box => box.scrollWidth > box.clientWidth + 1
      && ![box, box.parentElement].some(one => /auto|scroll/.test(getComputedStyle(one).overflowX))).length,
  }})
}}, {wait})
</script></body>"""
"""A page in a frame of some width, which says what it looks like."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="no built site: make docs"),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """The site, and a probe of each of its pages under /probe/."""

    def do_GET(self) -> None:
        if not self.path.startswith("/probe/"):
            return super().do_GET()
        _, _, width, wait, page = self.path.split("/", 4)
        text = PROBE.format(page=page, width=width, wait=wait).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def probe(address: str, page: str, width: int, dark: bool, folder: Path, wait: int = 400) -> dict[str, object]:
    """Open a page and return what it looks like. Names are resolved on this machine only."""
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=15000"]
    words += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1500,1000", "--dump-dom"]
    done = subprocess.run(
        [*words, f"{address}/probe/{width}/{wait}/{page}"], capture_output=True, text=True, timeout=120, check=True
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stdout[:500]
    found: dict[str, object] = json.loads(title[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    return found


def brightness(colour: str) -> float:
    red, green, blue = (float(part) for part in re.findall(r"[\d.]+", colour)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_and_is_legible(address: str, page: str, width: int, dark: bool, tmp_path: Path) -> None:
    found = probe(address, page, width, dark, tmp_path)
    assert found["wide"] <= width and found["words"] > 200  # type: ignore[operator]
    assert found["theme"] == ("dark" if dark else "light")
    text, ground = brightness(str(found["text"])), brightness(str(found["ground"]))
    assert abs(text - ground) > 0.5 and (text > ground) == dark
    assert not found["unloaded"] and not found["cut"]
    assert all(name.startswith((address, "data:", "blob:")) for name in found["fetched"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "first"),
    {
        "learning rate": "how-to/tune.html",
        "custom loss": "how-to/faq.html#a-custom-loss",
        "NaN": "how-to/faq.html#nan-in-training",
        "resume": "how-to/resume.html",
        "FENDA": "tutorials/02_personalise.html",
        "stragglers": "tutorials/07_stragglers.html",
    }.items(),
)
def test_search_finds(address: str, words: str, first: str, tmp_path: Path) -> None:
    found = probe(address, f"search.html?q={quote(words)}", 1440, False, tmp_path, wait=6000)["found"]
    assert isinstance(found, list) and found[0] == first
    assert not [name for name in found[:3] if name.startswith(("results/", "about/"))]


def test_no_page_names_a_thing_to_fetch_from_elsewhere() -> None:
    for page in SITE.rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"([^\"]+)", page.read_text())
        fetched += re.findall(r"<link[^>]* rel=\"(?:stylesheet|preload|icon)\"[^>]* href=\"([^\"]+)", page.read_text())
        assert not [name for name in fetched if name.startswith(("http:", "https:", "//"))], page


def test_every_public_name_has_a_page() -> None:
    import importlib

    from fedlightning.catalogue import ALGORITHMS

    methods = {row.name for row in ALGORITHMS}
    pages = {path.stem for path in (SITE / "reference").rglob("*.html")}
    for module in ("fedlightning", "algorithm", "callbacks", "datamodules", "models", "wrappers", "testing"):
        package = importlib.import_module(module if module == "fedlightning" else f"fedlightning.{module}")
        for name in package.__all__:
            assert (name.lower() if name in methods else name) in pages, name
    listed = (SITE / "llms.txt").read_text()
    assert "02_personalise.html): Where clients have different classes" in listed and "Go to the end" not in listed
    assert ": \n" not in listed
    assert "FENDA" in listed and len((SITE / "llms-full.txt").read_text()) > 100_000
