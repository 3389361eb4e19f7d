"""`fedlightning sites`: what it prints of a status file."""

from __future__ import annotations

import json
import os
from time import gmtime, strftime, time
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedlightning.cli import main
from fedlightning.commands import sites as command
from fedlightning.resume.lock import RunLock
from fedlightning.sites.status import FILE, OwnStatus, ServerStatus, SiteStatus, StatusFile

SITES = [
    SiteStatus(
        "basel", ["a", "b"], "connected", 1e9, doing="trains client a", doing_since=1e9, round=3, heard=1e9, failures=2
    ),
    SiteStatus("[red]x[/red]\x1b[2J", [], "refused", 1e9, "another [bold]model"),
    SiteStatus("zug"),
]


def shown(capsys, *words):
    code = main(("sites", *words))
    out = capsys.readouterr()
    return code, out.out + out.err


def write(folder, **more):
    StatusFile(folder).write(
        ServerStatus(1e9, expected=3, run="runs/x", rounds_done=2, max_rounds=9, sites=SITES, **more)
    )


@pytest.mark.parametrize("width", [40, 80, 100, 200])
@pytest.mark.parametrize("later", [9.0, 3600 * 5, 86400 * 9205 + 3600 * 9, 86400 * 9205 + 3600 * 23])
def test_a_server_that_runs(tmp_path, capsys, monkeypatch, later, width):
    """Whatever the hour and the width of the terminal, nothing is cut off: only what a site does may wrap."""
    monkeypatch.setattr(command, "time", SimpleNamespace(time=lambda: 1e9 + later, strftime=strftime, localtime=gmtime))
    monkeypatch.setattr(command, "console", lambda: Console(width=width))
    with RunLock(tmp_path):
        write(tmp_path)
        code, text = shown(capsys, "--folder", str(tmp_path))
    words = " ".join(text.split())
    assert code == 0 and "Run: runs/x, 2 of 9 rounds finished" in words and "Server: runs, process" in words
    assert "1 connected, 3 wanted" in text and "never here" in text
    assert f"connected {command.duration(later)}" in text and f"{command.duration(later)} ago" in text
    assert "2001-09-09 01:46:40" in text and "failures" in text and "trains" in text and "client" in text
    assert r"[red]x[/red]\x1b[2J" in text and "another [bold]model" in text and "\x1b" not in text and "…" not in text


@pytest.mark.parametrize(
    "ended, said", [({}, "was killed, or its machine was"), ({"ended": 1e9, "outcome": "finished"}, ": finished")]
)
def test_a_server_that_does_not_run(tmp_path, capsys, ended, said):
    write(tmp_path, **ended)
    code, text = shown(capsys, "--folder", str(tmp_path))
    assert code == 0 and said in text and "process" not in text
    assert "0 connected, 3 wanted" in text and "trains" not in text  # that was so when it was written


def test_for_programs(tmp_path, capsys):
    write(tmp_path)
    code, text = shown(capsys, "--folder", str(tmp_path), "--json")
    found = json.loads(text)
    assert code == 0 and found["runs"] is False and found["kind"] == "server"
    assert [site["state"] for site in found["sites"]] == ["not connected", "refused", "not connected"]
    with RunLock(tmp_path):
        write(tmp_path)
        found = json.loads(shown(capsys, "--folder", str(tmp_path), "--json")[1])
    assert found["runs"] and found["sites"][0]["state"] == "connected" and found["sites"][0]["doing"]


def test_a_site(tmp_path, capsys):
    with RunLock(tmp_path):
        StatusFile(tmp_path).write(
            OwnStatus(
                "basel", "fl:1", 1e9, clients=["a"], since=1e9, reason="Nobody listens at fl:1", run="r1", run_since=1e9,
                last="trains client a", last_at=1e9, round=4, tasks=7, refused="no", refused_at=1e9,
            )
        )  # fmt: skip
        code, text = shown(capsys, "--folder", str(tmp_path))
    assert code == 0 and "basel with client a" in text and "fl:1, not connected since" in text
    assert "Nobody listens" in text and "7 tasks, 0 failures" in text and "round 4" in text and "Refused: no (" in text


def test_no_file_and_a_damaged_one_are_sentences(tmp_path, capsys):
    code, text = shown(capsys, "--folder", str(tmp_path))
    assert code == 2 and "There is no status.json" in text and "--folder" in text
    (tmp_path / FILE).write_bytes(b"\0\xff")
    code, text = shown(capsys, "--folder", str(tmp_path))
    assert code == 2 and "is damaged: it is not JSON" in text and "Traceback" not in text


@pytest.fixture
def site_with_runs(tmp_path):
    StatusFile(tmp_path).write(OwnStatus("zug", "server:1", 1e9))
    for number, days in enumerate((100, 40, 1)):
        for part in ("asked", "records", "models"):
            folder = tmp_path / part / f"{number:032x}"
            folder.mkdir(parents=True)
            (folder / "a.ckpt").write_bytes(b"x" * 10**6)
            for path in (folder / "a.ckpt", folder):
                os.utime(path, (time() - days * 86400,) * 2)
    return tmp_path


def test_the_runs_that_a_site_keeps_are_shown_and_old_ones_removed(site_with_runs, capsys):
    words = ("--folder", str(site_with_runs))
    code, text = shown(capsys, *words, "--runs")
    assert (
        code == 0
        and "Runs:    3 in" in text
        and f"{1:032x}" in text
        and "3 models, 3.0 MB, last used 40 d 0 h ago" in " ".join(text.split())
    )
    found = json.loads(shown(capsys, *words, "--runs", "--json")[1])
    assert [(int(run["name"], 16), run["num_bytes"], run["models"]) for run in found] == [
        (0, 3 * 10**6, 3),
        (1, 3 * 10**6, 3),
        (2, 3 * 10**6, 3),
    ]
    code, text = shown(capsys, *words, "--prune", "30")
    assert code == 0 and "2 removed" in text and f"{2:032x}" not in text
    assert {path.name for path in (site_with_runs / "models").iterdir()} == {f"{2:032x}"}


def test_runs_of_a_site_at_work_and_of_a_server_are_not_removed(site_with_runs, tmp_path_factory, capsys):
    server = tmp_path_factory.mktemp("server")
    write(server)
    with RunLock(site_with_runs):
        code, text = shown(capsys, "--folder", str(site_with_runs), "--prune", "0")
        assert code != 0 and "is being written by process" in text
    assert len(list((site_with_runs / "models").iterdir())) == 3
    for folder, days, why in (
        (server, "0", "is a server's"),
        (site_with_runs, "-1", "from 0"),
        (site_with_runs, "nan", "from 0"),
    ):
        code, text = shown(capsys, "--folder", str(folder), "--prune", days)
        assert code != 0 and why in " ".join(text.split())
