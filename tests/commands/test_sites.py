"""`fedlightning sites`: what it prints of a status file."""

from __future__ import annotations

import json

import pytest

from fedlightning.cli import main
from fedlightning.engines.sites.status import FILE, OwnStatus, ServerStatus, SiteStatus, StatusFile
from fedlightning.run.lock import RunLock

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


def test_a_server_that_runs(tmp_path, capsys, monkeypatch):
    with RunLock(tmp_path):
        write(tmp_path)
        monkeypatch.setattr(
            "time.time", lambda: 1e9 + 9 * 86400.0
        )  # else the table folds words at some hours of the day
        code, text = shown(capsys, "--folder", str(tmp_path))
    words = " ".join(text.split())
    assert code == 0 and "Run: runs/x, 2 of 9 rounds finished" in words and "Server: runs, process" in words
    assert "1 connected, 3 wanted" in text and "never here" in words and "connected 9" in words
    assert "trains" in words and "client a" in words and "2001-09-09" in words
    assert "[red]x[/red]" in words.replace(" ", "") and "another [bold]model" in words and "\x1b" not in text


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
    assert code == 2 and "is damaged: it is no JSON" in text and "Traceback" not in text
