"""What a client keeps stays under the terms under which it was kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedlightning.callbacks import FedAvg, FedPer
from fedlightning.engines.contract import Visit
from fedlightning.wire import read, write
from tests.sites.helpers import Line, at_sites, sites, tasks_in


def test_a_private_head_of_an_earlier_run_does_not_leave_in_a_run_of_another_method(tmp_path: Path) -> None:
    parts = sites(tmp_path, FedPer())
    at_sites(Line(parts), tmp_path / "earlier", FedPer())
    run = parts["1"]._session.run  # type: ignore[union-attr]
    version = parts["1"].records.versions(run, "site1")[-1]
    assert "head.weight" in parts["1"].records.get(run, "site1", version).personal

    parts, asked = sites(tmp_path, FedAvg()), list[bytes]()
    line = Line(parts)
    line.watch = lambda node, data: asked.append(data) or data if node == "1" else data  # type: ignore[func-returns-value]
    at_sites(line, tmp_path / "later", FedAvg())
    hello = next(found for found in map(read, asked) if found["do"] == "hello")
    visit = next(one for data in asked for one in tasks_in(data) if isinstance(one, Visit) and one.client == "site1")
    assert "answer" in read(parts["1"].answer(write(hello | {"session": "again", "run": run})))
    message = replace(visit.message, state={}, returns=("head.weight",), work=0)
    task = {"task": replace(visit, message=message), "number": "1", "version": version, "keep": None}
    reply = read(parts["1"].answer(write({"do": "tasks", "session": "again", "tasks": [task], "budget": 1.0})))
    assert "under which other parts of the model leave" in read(reply["answer"][0])["refused"]


def test_the_version_that_a_visit_began_from_stays_for_a_server_that_goes_back(tmp_path: Path) -> None:
    parts, seen = sites(tmp_path / "sites", FedPer()), list[bytes]()
    line = Line(parts)
    line.watch = lambda node, data: seen.append(data) or data if node == "1" else data  # type: ignore[func-returns-value]
    at_sites(line, tmp_path / "server", FedPer())
    asked, site = list(map(read, seen)), parts["1"]
    given = [one for request in asked if request["do"] == "tasks" for one in request["tasks"]]
    last = [one for one in given if isinstance(one["task"], Visit) and one["task"].client == "site1"][-1]
    for number in ("first", "second"):
        tasks = {"do": "tasks", "tasks": [last | {"number": number, "keep": []}], "budget": 1.0}
        reply = read(read(site.answer(write(tasks | {"session": asked[-1]["session"]})))["answer"][0])
        kept = site.records.versions(site._session.run, "site1")  # type: ignore[union-attr]
        assert set(kept) == {last["version"], reply["version"]}
