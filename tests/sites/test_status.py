"""The logs of a server and of a site: what they say, what they write, and what is read back."""

from __future__ import annotations

import json

import pytest

from fedlightning.callbacks import FedProx
from fedlightning.contract.messages import Update
from fedlightning.engines.attempts import ClientFailedError
from fedlightning.errors import ConfigurationError
from fedlightning.options import FailurePolicy
from fedlightning.sites.engine import MENDING
from fedlightning.sites.server_log import Run, ServerLog, showing
from fedlightning.sites.site_log import SiteLog
from fedlightning.sites.status import FILE, OwnStatus, ServerStatus, StatusFile, printable, read
from fedlightning.storage.files import UnreadableError
from fedlightning.wire import read as packed
from fedlightning.wire import write
from tests.sites.helpers import SHARES, Line, a_site, at_sites, changed, sites
from tests.sites.test_failures import updates_of, visits_of

NAMES = [f"home of {clients[0]}" for clients in SHARES]


class Always(StatusFile):
    """A file that is due whenever it is asked; counts how often it was written."""

    count = 0

    @property
    def is_due(self):
        return True

    def write(self, status, lasting=False):
        self.count += 1
        super().write(status, lasting)


def log(folder, said, **given):
    return ServerLog(folder, 2, say=said.append, file=Always(folder, every=0.0), **given)


def test_what_a_server_shows_while_a_run_goes_on(tmp_path):
    """At a visit of round 2 the file has both sites, what they do, and the failure of round 1."""
    line, said, seen = Line(sites(tmp_path / "sites")), [], []
    failures = [{"client": "site1"}, {"client": "site1"}, {"client": "site0"}]
    own = log(tmp_path, said, run=lambda: Run("runs/x", 1, 2, failures), site_names=["basel", NAMES[0]])

    def watched(name, data):
        if any(round == 1 for round, _ in updates_of(data)):
            seen.append(read(tmp_path))
        return data

    line.reply = watched
    with showing(own):
        at_sites(line, tmp_path / "server")
    own.end("finished")
    shown = seen[-1]
    by_name = {site.name: site for site in shown.sites}
    assert (shown.run, shown.rounds_done, shown.max_rounds, shown.expected) == ("runs/x", 1, 2, 2)
    assert [by_name[name].clients for name in NAMES] == [list(clients) for clients in SHARES]
    assert all(by_name[name].state == "connected" and by_name[name].heard for name in NAMES)
    assert any("client site" in by_name[name].doing and by_name[name].round == 2 for name in NAMES)
    assert [by_name[name].failures for name in NAMES] == [1, 2]
    assert by_name["basel"].state == "not connected" and by_name["basel"].since is None
    assert said == [
        "Site 'home of site0' is here with clients site0, site3 (1 of 2).",
        "Site 'home of site1' is here with clients site1, site2 (2 of 2).",
    ]
    last = read(tmp_path)
    assert (
        last.ended is not None
        and last.outcome == "finished"
        and {site.state for site in last.sites} == {"not connected"}
    )


def test_a_site_that_goes_and_comes_back_is_said(tmp_path):
    line, said, states = Line(sites(tmp_path / "sites")), [], []
    own = log(tmp_path, said)

    def go(node, data):
        if "1" in line.sites and node == "1" and visits_of(data, 1):
            del line.sites["1"]
        return data

    def come(name, data):
        if "1" not in line.sites and "2" not in line.sites:
            states.extend(site.state for site in read(tmp_path).sites)
            line.sites["2"] = a_site(tmp_path / "sites" / "1", SHARES[1]).answer
        return data

    line.watch, line.reply = go, come
    with showing(own):
        trainer = at_sites(line, tmp_path / "server")
    assert trainer.rounds_done == 2 and states
    assert said[2:] == [f"Site '{NAMES[1]}' is gone; it may come back.", f"Site '{NAMES[1]}' is back."]


def test_a_refusal_is_shown_with_its_reason(tmp_path):
    own = log(tmp_path, [])
    line = Line({"0": sites(tmp_path / "a")["0"], "1": sites(tmp_path / "b", FedProx(mu=0.3))["1"]})
    line.owner = lambda node: {"1": NAMES[1]}.get(node)
    with showing(own), pytest.raises(ConfigurationError):
        at_sites(line, tmp_path / "server")
    (refused,) = [site for site in read(tmp_path).sites if site.state == "refused"]
    assert refused.name == NAMES[1] and "callbacks" in refused.reason and refused.since


def test_the_reason_of_a_failure_names_the_site(tmp_path):
    """In the warning, the summary and the error that ends a run; clients that are called as their site are not told twice."""

    def fails(answer, part):
        if isinstance(answer, Update) and (answer.round, answer.client) == (1, "site1"):
            answer.error = "client 'site1' failed: KeyError: 'x\x1b[2J'"
            return write({"answer": answer, "version": None, "loop": None})
        return part

    line = Line(sites(tmp_path / "sites"))
    line.reply = lambda name, data: changed(data, fails)
    sentence = "client 'site1' at site 'home of site1' failed: KeyError: 'x\\x1b[2J'"
    with pytest.warns(UserWarning) as warned:
        trainer = at_sites(line, tmp_path / "server")
    assert any(str(one.message).startswith(f"Round 2: {sentence}") for one in warned)
    assert [one["reason"] for one in trainer.summary["failures"]] == [sentence]
    assert trainer.summary["sites"] == {NAMES[0]: ["site0", "site3"], NAMES[1]: ["site1", "site2"]}
    line = Line(sites(tmp_path / "again"))
    line.reply = lambda name, data: changed(data, fails)
    with pytest.raises(ClientFailedError, match="at site 'home of site1' failed"):
        at_sites(line, tmp_path / "stops", failures=FailurePolicy("stop", timeout=30.0))


def test_two_sites_of_one_name_are_refused(tmp_path):
    """Only the same clients under the same name are the same site, started anew."""
    parts = sites(tmp_path / "sites")
    parts["1"].name = NAMES[0]
    with pytest.raises(ConfigurationError, match="another site is here under the name"):
        at_sites(Line(parts), tmp_path / "server")


def test_a_site_that_the_server_refuses_is_told_why(tmp_path):
    """At its own terminal and in its own file, before the server ends; what it is told does nothing to the terminal."""
    parts, said = sites(tmp_path / "sites"), []
    parts["1"].name = NAMES[0]
    parts["1"].log = SiteLog(tmp_path, "basel", "fl:1", SHARES[1], say=said.append)
    with pytest.raises(ConfigurationError, match="another site is here under the name"):
        at_sites(Line(parts), tmp_path / "server")
    assert said[-1].startswith(
        "fl:1 does not let this site take part: another site is here under the name 'home of site0'"
    )
    found = read(tmp_path)
    assert found.state == "refused" and "another site is here" in found.reason
    parts["1"].answer(write({"do": "turned away", "session": "", "why": "x\x1b[2J"}))
    assert said[-1] == "fl:1 does not let this site take part: x\\x1b[2J."


def test_a_refused_site_that_hears_nothing_is_not_waited_for_for_ever(tmp_path):
    parts = sites(tmp_path / "sites")
    parts["1"].name = NAMES[0]
    line = Line(parts)
    line.watch = lambda node, data: None if packed(data).get("do") == "turned away" else data
    with pytest.raises(ConfigurationError, match="another site is here under the name"):
        at_sites(line, tmp_path / "server")
    assert MENDING < line.now < MENDING + 60


def test_lines_have_the_time_in_front(capsys, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "2031-01-02 03:04:05")
    SiteLog(None, "basel", "fl:1").connection(None)
    ServerLog(None, 1)._say("Site 'basel' is gone.")
    out, err = capsys.readouterr()
    assert out == "2031-01-02 03:04:05 Connected to fl:1.\n" and err == "2031-01-02 03:04:05 Site 'basel' is gone.\n"


def test_a_site_that_started_anew_does_not_count_twice(tmp_path):
    """Its old node is connected still for a while; a run of two sites begins with two sites all the same."""
    parts = sites(tmp_path / "sites")
    line = Line({"0": parts["0"], "1": a_site(tmp_path / "sites" / "0", SHARES[0])})
    late = []

    def come(name, data):
        if len(late) < 4:
            late.append(name)
        else:
            line.sites.setdefault("2", parts["1"].answer)
        return data

    line.reply = come
    make = Line.receive

    def receive(waiting, timeout):
        found = make(line, waiting, timeout)
        if not found:
            late.append("")
            come("", b"")
        return found

    line.receive = receive
    trainer = at_sites(line, tmp_path / "server")
    assert set(trainer.server.clients) == {"site0", "site1", "site2", "site3"} and trainer.rounds_done == 2


@pytest.mark.parametrize("name", ["", "x" * 81, "a\x1b[31m", "a\nb"], ids=["empty", "long", "colour", "lines"])
def test_names_that_are_none(tmp_path, name):
    parts = sites(tmp_path / "sites")
    parts["1"].name = name
    with pytest.raises(ConfigurationError, match="is not a name of a site") as refused:
        at_sites(Line(parts), tmp_path / "server")
    assert str(refused.value).isprintable()


def test_a_site_by_another_sites_key_is_refused(tmp_path):
    line = Line(sites(tmp_path / "sites"))
    line.owner = lambda node: {"0": NAMES[0], "1": "basel"}[node]
    with pytest.raises(ConfigurationError, match="site 'basel', by its key, says that it is 'home of site1'"):
        at_sites(line, tmp_path / "server")


def test_the_diary_of_a_site(tmp_path):
    parts, said = sites(tmp_path / "sites"), []
    parts["0"].log = SiteLog(tmp_path, "basel", "fl:1", SHARES[0], say=said.append)
    parts["0"].log.connection("Gone.")
    parts["0"].log.joined("a name that the run has until its server has read what it goes on with")
    at_sites(Line(parts), tmp_path / "server")
    parts["0"].answer(b"nonsense")
    parts["0"].answer(b"nonsense")
    found = read(tmp_path)
    assert isinstance(found, OwnStatus) and found.state == "connected" and found.clients == list(SHARES[0])
    assert found.round == 2 and found.tasks > 4 and found.failures == 0 and found.run
    assert "header" in found.refused
    assert said.pop(0).startswith("Gone.")
    assert said[0] == "Connected to fl:1." and said[1].startswith(f"Takes part in run {found.run[:11]}")
    assert [text.partition(" in ")[0] for text in said[2:6]] == [
        f"Round {round}: trained client {client}" for round in (1, 2) for client in SHARES[0]
    ]
    assert len(said) == 7 and said[6].startswith("Refused a request of fl:1: ")
    parts["0"]._reply = lambda request: 1 / 0
    assert b"in errors.log there" in parts["0"].answer(b"")
    assert said[7].endswith(f"in {parts['0'].texts.file})")  # here it is a file that can be opened
    parts["0"].log.end()
    assert read(tmp_path).state == "ended"


def test_the_file_is_written_when_something_changed_and_not_too_often(tmp_path):
    now = [0.0]
    file = StatusFile(tmp_path, every=1.0, clock=lambda: now[0])
    status = ServerStatus(started=1.0)
    assert file.is_due
    file.write(status)
    first = (tmp_path / FILE).stat().st_ino
    assert not file.is_due
    now[0] = 1.0
    file.write(status)
    assert file.is_due and (tmp_path / FILE).stat().st_ino == first  # nothing has changed
    status.doing = "waits"
    file.write(status)
    assert (tmp_path / FILE).stat().st_ino != first and not file.is_due


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path):
    file = StatusFile(tmp_path / "nowhere")
    with pytest.warns(UserWarning, match="shows nothing new"):
        file.write(ServerStatus(started=1.0))
    assert not file.is_due


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda found: "{", "not JSON"),
        (lambda found: [], "no entries"),
        (lambda found: found | {"format": 9}, "its format is 9"),
        (lambda found: found | {"kind": ["server"]}, "neither"),
        (lambda found: found | {"started": "now"}, "'started' is 'now'"),
        (lambda found: found | {"sites": [3]}, "'sites' is [3]"),
        (lambda found: found | {"sites": 3}, "'sites' is 3"),
        (lambda found: {key: value for key, value in found.items() if key != "run"}, "has no 'run'"),
        (lambda found: found | {"started": float("nan")}, "'started' is nan"),
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path, change, said):
    StatusFile(tmp_path).write(ServerStatus(started=1.0))
    changed = change(json.loads((tmp_path / FILE).read_text()))
    (tmp_path / FILE).write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(UnreadableError, match="is damaged") as error:
        read(tmp_path)
    assert said in str(error.value)


def test_what_is_printed_does_nothing_to_a_terminal():
    assert printable("a\x1b]0;x\x07\u202eb\r\n") == "a\\x1b]0;x\\x07\\u202eb"
    assert len(printable("x" * 9999)) == 500
