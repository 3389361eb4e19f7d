"""What does not run at sites is refused before round 1, in the words of the list in docs/how-to/deploy.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedlightning.deployment.export import Deploy, Deployed
from fedlightning.errors import ConfigurationError
from fedlightning.sites.engine import MENDING
from fedlightning.testing.toys import ToyData
from fedlightning.wire import read, write
from tests.conformance.case import Case, collect
from tests.sites.helpers import REFUSED, SHARES, Line, _parts, a_site, at_sites, sites

CASES: dict[str, Case] = collect("CASES")


@pytest.mark.parametrize("name", [name for name in REFUSED if name in CASES])  # without extras some are not there
def test_it_is_refused_with_a_way_out(tmp_path, name):
    case, tasks = CASES[name], []
    arguments = {key: value for key, value in case.arguments.items() if key not in ("max_rounds", "evaluation")}
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


# -- before round 1 ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["under another name", "under the same name"])
def test_a_site_that_is_refused_may_come_back_mended(tmp_path, how):
    """One site's mistake ended the server for all of them."""
    other = a_site(tmp_path / "sites" / "1", SHARES[1], lr=0.5)
    line = Line(sites(tmp_path / "sites"))
    mended = line.sites.pop("1")
    line.sites["1"], line.expected = other.answer, 2

    class Later(Line):
        def receive(self, waiting, timeout):
            if self.now > 100:
                self.sites.pop("1", None)
                self.sites["1" if how == "under the same name" else "2"] = mended
            return super().receive(waiting, timeout)

    line.__class__ = Later
    with pytest.warns(UserWarning, match="A site does not take part: .*is not that of site") as told:
        trainer = at_sites(line, tmp_path / "server")
    assert trainer.rounds_done == 2 and not trainer.summary.get("failures")
    assert sum("does not take part" in str(one.message) for one in told) == 1


def test_a_site_that_is_not_mended_ends_the_wait(tmp_path):
    line = Line(sites(tmp_path / "sites") | {"1": a_site(tmp_path / "sites" / "1", SHARES[1], lr=0.5)})
    with pytest.raises(ConfigurationError, match=r"The run does not begin: .*is not that of site"):
        at_sites(line, tmp_path / "server")
    assert MENDING < line.now < MENDING + 60


def test_others_begin_without_a_refused_site_where_they_are_enough(tmp_path):
    line = Line(sites(tmp_path / "sites"))
    line.sites["0 refused"] = a_site(tmp_path / "more", SHARES[1], lr=0.5).answer
    line.expected = 2
    assert at_sites(line, tmp_path / "server").rounds_done == 2


class AgreeingData(ToyData):
    """Data that agree on a sum, without using it."""

    wanted_statistics = {"moments": ["x"], "bins": {}, "words": {}, "least": 1}

    def statistics_of(self, client):
        return {"moments x": [1.0, 2.0, 3.0]}

    def with_statistics(self, totals):
        return self


@pytest.mark.parametrize("when", ["it is asked", "it comes again"])
@pytest.mark.parametrize("mended", [True, False])
def test_a_site_that_refuses_after_it_was_let_in_may_come_back_mended_too(tmp_path, monkeypatch, when, mended):
    """It ended the server for all at once."""
    monkeypatch.setattr("tests.sites.helpers.ToyData", AgreeingData)
    clients = (("site0", "site3"), ("site1",), ("site2",))
    line = Line({str(n): a_site(tmp_path / str(n), own) for n, own in enumerate(clients)})
    greeted, site, full = [], line.sites["1"], write({"refused": "the disk is full"})

    def answer(data):
        do = read(data)["do"]
        greeted.extend([do] if do == "hello" else [])
        refuses = do == "measure" if when == "it is asked" else do == "hello" and len(greeted) > 1
        return full if refuses and (line.now < 200 or not mended) else site(data)

    line.sites["1"] = answer
    if mended:
        assert at_sites(line, tmp_path / "server").rounds_done == 2
    else:
        with pytest.raises(ConfigurationError, match=r"The run does not begin: .*the disk is full"):
            at_sites(line, tmp_path / "server")
        assert MENDING < line.now < MENDING + 60
