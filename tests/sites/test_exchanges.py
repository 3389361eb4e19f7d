"""How often server and sites exchange messages: an exchange takes seconds, whatever is in it."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from fedlightning.callbacks import FENDA, SCAFFOLD
from fedlightning.contract.messages import Update
from fedlightning.engines.contract import Visit
from fedlightning.errors import ConfigurationError
from fedlightning.options import Evaluation
from fedlightning.sites import site as site_module
from fedlightning.testing import runs
from fedlightning.wire import read, write
from tests.sites.helpers import Line, answers_in, at_sites, sites, tasks_in, together
from tests.sites.test_equal import rows


class Heard:
    """What goes over a line, in its order.

    Attributes:
        said: `("send", kinds)` of each request, `("reply", [])` of each reply.
    """

    def __init__(self, line):
        self.said = []
        line.watch, line.reply = self.request, self.answer

    def request(self, node, data):
        kinds = [type(task).__name__ for task in tasks_in(data)] or [read(data)["do"]]
        self.said.append(("send", kinds))
        return data

    def answer(self, name, data):
        self.said.append(("reply", []))
        return data

    def before(self, kind):
        """Return what was said before the first request of a kind."""
        place = next(number for number, (_, kinds) in enumerate(self.said) if kind in kinds)
        return self.said[:place]

    def count(self, kind):
        return sum(kinds.count(kind) for _, kinds in self.said)


def exchanges(said):
    """Return how often requests followed on replies."""
    ways = [way for way, _ in said]
    return sum(way == "send" and (not number or ways[number - 1] == "reply") for number, way in enumerate(ways))


def test_two_exchanges_before_round_1_and_no_question_about_data_ever(tmp_path):
    """A greeting, and one for the checks that need a batch and the tries of all steps."""
    arguments = {"sanity_check": True, "evaluation": Evaluation(test_data=["local"])}
    line = Line(sites(tmp_path / "sites", FENDA(head="head"), **arguments))
    heard = Heard(line)
    trainer = at_sites(line, tmp_path / "server", FENDA(head="head"), **arguments)
    trainer.test(verbose=False)
    before = heard.before("Visit")
    assert exchanges(before) == 2 and heard.count("describe") == 0
    assert heard.count("StepTrial") == 2 and heard.count("hello") == 2
    assert trainer.summary["data"]["clients"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return together(tmp_path_factory.mktemp("alone"), SCAFFOLD())


def same(one, other):
    return runs.same_tree(one.server.models, other.server.models) and rows(one) == rows(other)


def clocks(line, step):
    """Let every look at the time of a site take some seconds."""
    for answer in line.sites.values():
        site, now = answer.__self__, [0.0]
        site._clock = lambda now=now: (now.__setitem__(0, now[0] + step), now[0])[1]


def test_one_message_for_all_clients_of_a_site(tmp_path, alone):
    line = Line(sites(tmp_path / "sites", SCAFFOLD()))
    clocks(line, 0.0)
    heard = Heard(line)
    assert same(alone, at_sites(line, tmp_path / "server", SCAFFOLD()))
    visits = [kinds for _, kinds in heard.said if "Visit" in kinds]
    assert visits == [["Visit", "Visit"]] * 4  # two sites, two rounds


@pytest.mark.parametrize("limit", ["time", "bytes"])
def test_a_site_answers_with_what_is_done_and_is_sent_the_rest_again(tmp_path, alone, limit, monkeypatch):
    line = Line(sites(tmp_path / "sites", SCAFFOLD()))
    clocks(line, 10.0 if limit == "time" else 0.0)
    if limit == "bytes":
        monkeypatch.setattr(site_module, "REPLY_BYTES", 1)
    seen, answered = [], []
    line.watch = lambda node, data: (seen.extend([tasks_in(data)] * bool(tasks_in(data))), data)[1]
    line.reply = lambda name, data: (answered.append(answers_in(data)), data)[1]
    assert same(alone, at_sites(line, tmp_path / "server", SCAFFOLD()))
    first = next(one for one in answered if len(one) == 2)
    assert first[0] is not None and first[1] is None
    updates = [answer for one in answered for answer in one if isinstance(answer, Update)]
    assert len(updates) == 8  # nothing is done twice
    in_round = [
        [len(tasks) for tasks in seen if isinstance(tasks[0], Visit) and tasks[0].message.round == n] for n in (0, 1)
    ]
    assert max(in_round[0]) == 2  # from then on a site that is slow is sent one task after another
    assert max(in_round[1]) == (1 if limit == "time" else 2)


def test_a_message_that_gets_lost_is_carried_out_once(tmp_path, alone):
    """The site knows the tasks that come again; its clients' records go on from where they were."""
    line = Line(sites(tmp_path / "sites", SCAFFOLD()))
    count = [0]

    def lose(name, data):
        count[0] += bool(answers_in(data))
        return write({"lost": ""}) if count[0] == 1 else data

    line.reply = lose
    assert same(alone, at_sites(line, tmp_path / "server", SCAFFOLD()))
    assert count[0] > 1


@pytest.mark.parametrize(
    "nonsense", [b"nonsense", write({"answer": 3}), write({"answer": [b""]}), write({"refused": "no"})]
)
@pytest.mark.fast_cases(2)
def test_a_reply_that_is_nonsense_as_a_whole_is_asked_for_task_by_task(tmp_path, alone, nonsense):
    line = Line(sites(tmp_path / "sites", SCAFFOLD()))
    line.reply = lambda name, data: nonsense if len(answers_in(data)) > 1 else data
    trainer = at_sites(line, tmp_path / "server", SCAFFOLD())
    assert same(alone, trainer) and not trainer.summary.get("failures")


def test_a_site_that_carries_out_nothing_has_failed(tmp_path):
    line = Line(sites(tmp_path / "sites", max_rounds=1))
    idle = write({"unknown": ""})
    line.reply = lambda name, data: (
        write({"answer": [idle for _ in answers_in(data)]})
        if any(isinstance(one, Update) and one.client == "site1" for one in answers_in(data))
        else data
    )
    trainer = at_sites(line, tmp_path / "server", max_rounds=1)
    failed = {one["client"]: one["reason"] for one in trainer.summary["failures"]}
    assert set(failed) == {"site1", "site2"} and all("carries out none" in reason for reason in failed.values())


def test_a_site_that_describes_other_clients_is_refused(tmp_path):
    line = Line(sites(tmp_path / "sites"))

    def renamed(name, data):
        said = read(data)
        if isinstance(said.get("answer"), dict):
            said["answer"]["data"].sizes["site9"] = (1, 1, 1)
        return write(said)

    line.reply = renamed
    with pytest.raises(ConfigurationError, match="does not describe its data"):
        at_sites(line, tmp_path / "server")


def test_an_unknown_monitor_is_refused_with_the_sentence_of_one_process(tmp_path):
    arguments = {"sanity_check": True, "others": [EarlyStopping("val_los")]}
    with pytest.raises(ConfigurationError, match="monitors 'val_los'") as here:
        together(tmp_path / "one", **arguments)
    line = Line(sites(tmp_path / "sites", **arguments))
    heard = Heard(line)
    with pytest.raises(ConfigurationError, match="monitors 'val_los'") as there:
        at_sites(line, tmp_path / "server", **arguments)
    assert str(here.value) == str(there.value) and exchanges(heard.said) == 2


def test_clients_that_are_held_out_are_described_without_a_question(tmp_path):
    line = Line(sites(tmp_path / "sites", held_out=["site2"]))
    heard = Heard(line)
    trainer = at_sites(line, tmp_path / "server", held_out=["site2"])
    assert heard.count("describe") == 0 and trainer.client_ids == ["site0", "site1", "site3"]
    one = together(tmp_path / "one", held_out=["site2"])
    no_labels = {client: held | {"classes": None} for client, held in one.summary["data"]["clients"].items()}
    assert trainer.summary["data"]["clients"] == no_labels  # counts of labels stay at their sites
