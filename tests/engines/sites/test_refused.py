"""What does not run at sites is refused before round 1, in the words of the list in docs/how-to/deploy.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedlightning.errors import ConfigurationError
from fedlightning.federation.deploy import Deploy, Deployed
from fedlightning.wire import read, write
from tests.conformance.case import Case, collect
from tests.engines.sites.helpers import REFUSED, SHARES, Line, _parts, a_site, at_sites, sites

CASES: dict[str, Case] = collect("CASES")


@pytest.mark.parametrize("name", [name for name in REFUSED if name in CASES])  # without extras some are not there
def test_it_is_refused_with_a_way_out(tmp_path, name):
    case, tasks = CASES[name], []
    arguments = {key: value for key, value in case.arguments.items() if key not in ("max_rounds", "evaluate_every")}
    line = Line(sites(tmp_path / "sites", case.algorithm, **arguments))
    line.watch = lambda node, data: (tasks.append(b"Visit" in data), data)[1]
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
        at_sites(line, tmp_path / "server", case.algorithm, public=True, **arguments)
    assert not any(tasks)


def test_the_page_names_them():
    page = Path("docs/how-to/deploy.md").read_text().partition("## What runs")[2].partition("\n## ")[0]
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {name for cell in table for name in re.findall(r"`([A-Z]\w+)`", cell)} == {
        name.split()[0] for name in REFUSED
    }


def test_a_site_that_does_not_allow_it_sends_no_model(tmp_path):
    """Its own configuration decides, before round 1; and a server that asks all the same is refused."""
    line = Line(sites(tmp_path / "sites", export=True) | {"1": a_site(tmp_path / "sites" / "1", SHARES[1])})
    with pytest.raises(
        ConfigurationError, match=r"models of the clients.*'home of site1' does not give.*--export server"
    ):
        at_sites(line, tmp_path / "server", export=True)

    line, said = Line(sites(tmp_path / "others")), []

    def ask(node, data):
        asked = read(data)
        tasks = [
            {**one, "task": replace(one["task"], bring=True)} if isinstance(one["task"], Deploy) else one
            for one in asked.get("tasks", [])
        ]
        return write({**asked, "tasks": tasks}) if tasks else data

    line.watch, line.reply = ask, lambda name, data: (said.extend(_parts(data)), data)[1]
    at_sites(line, tmp_path / "other")
    assert sum("do not leave this site" in read(part).get("refused", "") for part in said) == 4
    assert not any(getattr(read(part).get("answer"), "content", None) for part in said)


@pytest.mark.parametrize(
    "forged, reason",
    [
        ({"hyper_parameters": {"_instantiator": "os.system"}}, "'_instantiator'"),
        ({"fedlightning": {"client": "site3"}}, "no checkpoint of it"),
        ({"state_dict": {"a": 1}}, "no checkpoint of it"),
    ],
)
def test_no_file_is_made_of_what_is_no_checkpoint(tmp_path, forged, reason):
    line = Line(sites(tmp_path / "sites", export=True))

    def forge(name, data):
        def change(answer, part):
            if not isinstance(answer, Deployed) or answer.client != "site0":
                return part
            return write({**read(part), "answer": replace(answer, content=answer.content | forged)})

        parts = _parts(data)
        return write({"answer": [change(read(part).get("answer"), part) for part in parts]}) if parts else data

    line.reply = forge
    trainer = at_sites(line, tmp_path / "server", export=True)
    (failure,) = trainer.server.failures
    assert reason in str(failure)
    assert not (trainer.run.path / "checkpoints/clients/site0.ckpt").exists()
