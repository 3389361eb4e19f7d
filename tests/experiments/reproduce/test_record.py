"""Recorded verdicts: of which commit they are."""

from __future__ import annotations

import subprocess

from fedlightning.experiments.reproduce.record import commit


def git(root, *words):
    words = ["-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_has_a_plus_where_code_was_changed_but_not_where_verdicts_were_recorded(tmp_path):
    assert commit(tmp_path) is None
    (tmp_path / "tables" / "recorded").mkdir(parents=True)
    code, recorded = tmp_path / "code.py", tmp_path / "tables" / "recorded" / "a.json"
    code.write_text("1")
    recorded.write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    recorded.write_text("2")
    assert commit(tmp_path) == head
    (recorded.parent / "code.py").write_text("1")
    git(tmp_path, "add", ".")
    assert commit(tmp_path) == f"{head}+"
    git(tmp_path, "reset", "-q", "--hard")
    assert commit(tmp_path) == head
    code.write_text("2")
    assert commit(tmp_path) == f"{head}+"
