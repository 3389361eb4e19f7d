"""The page: what it answers, to whom, and that a browser shows it without asking anybody else."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from http.client import HTTPConnection
from threading import Thread

import pytest

from fedlightning.cli import main
from fedlightning.commands.watch.pages import PAGE, PageServer
from tests.commands.test_watch_reading import finished, folder, study  # noqa: F401

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOOK = """<body><iframe src="{address}" style="width:{width}px;height:900px;border:0"></iframe><script>
setTimeout(() => {{ const page = document.querySelector("iframe").contentDocument
  document.title = JSON.stringify({{
    wide: page.documentElement.scrollWidth, text: page.body.innerText, curves: page.querySelectorAll("polyline").length,
    paper: page.defaultView.getComputedStyle(page.body).backgroundColor, bold: page.querySelectorAll("b b").length,
    asked: page.defaultView.performance.getEntriesByType("resource").map(entry => entry.name) }}) }}, 4000)
</script>"""


@pytest.fixture
def server(study):  # noqa: F811
    with PageServer(study) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server, path, **headers):
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read()


def test_it_answers_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1" and server.address == f"http://127.0.0.1:{server.server_port}/"
    answer, text = ask(server, "/")
    assert answer.status == 200 and text == PAGE.read_bytes()
    assert "default-src 'none'; connect-src 'self'" in answer.headers["Content-Security-Policy"]
    assert ask(server, "/", Host="elsewhere.example")[0].status == 403  # a name of elsewhere that leads here
    assert ask(server, "/study.json")[0].status == ask(server, "/../run/config.yaml")[0].status == 404
    assert ask(server, "/data?run=..%2Frun")[0].status == 404


def test_data_are_sent_when_they_have_changed(server):
    answer, text = ask(server, "/data?run=runs%2Ffedavg%2Fseed_0")
    assert json.loads(text)["rounds"] == 3
    again, nothing = ask(server, "/data?run=runs%2Ffedavg%2Fseed_0", **{"If-None-Match": answer.headers["ETag"]})
    assert again.status == 304 and nothing == b""
    assert json.loads(ask(server, "/data")[1])["kind"] == "grid"


@pytest.mark.parametrize(
    "summary", ['{"seconds": NaN, "per_round": [{"seconds": NaN}]}', '{"failures": {"a": 1}}', '{"per_round": ["x"]}']
)
def test_a_damaged_file_is_said_on_the_page(summary, tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {}")
    (tmp_path / "summary.json").write_text(summary)
    with PageServer(tmp_path) as damaged:
        state = json.loads(damaged.data(""), parse_constant=pytest.fail)
    assert state["kind"] == "damaged" and state["error"]


def test_a_taken_port_and_other_words_are_refused_in_a_sentence(server, capsys):
    assert main(["watch", "runs", "--port", str(server.server_port)]) == 2
    assert "cannot be had" in capsys.readouterr().err
    assert main(["watch", "runs", "--trainer.max_rounds=3"]) == 2
    assert "no option" in capsys.readouterr().err


class Fetched(HTMLParser):
    """What a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.found += [value for name, value in attrs if name in ("src", "href", "data", "action") and value != "#"]


def test_the_page_fetches_nothing_and_reads_no_text_as_html():
    page = Fetched()
    text = PAGE.read_text()
    page.feed(text)
    assert page.found == [] and {"html", "title", "main", "script", "style"} <= set(page.tags)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_who_watches_needs_no_torch():
    code = "import sys, fedlightning.commands.watch; print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("run", ["", "#runs%2Ffedavg%2Fseed_0"])
def test_a_browser_shows_it(server, tmp_path, run, width, dark):
    frame = LOOK.format(address=f"/{run}", width=width).encode()
    answer = server.RequestHandlerClass._answer

    class Framed(server.RequestHandlerClass):
        def do_GET(self):
            if self.path == "/page":
                answer(self, 200, frame, "text/html; charset=utf-8")
            else:
                super().do_GET()

        def send_header(self, name, value):
            if name != "Content-Security-Policy" or self.path != "/page":  # the frame is the test's own
                super().send_header(name, value)

    server.RequestHandlerClass = Framed
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=9000",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1500,1000",
         "--dump-dom", f"{server.address}page"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr[-500:]
    seen = json.loads(html.unescape(title[1]))
    assert seen["wide"] <= width and seen["paper"] == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert all(name.startswith(server.address) for name in seen["asked"])
    assert (seen["curves"] > 2 and "3 of 3" in seen["text"]) if run else "fedper" in seen["text"]
