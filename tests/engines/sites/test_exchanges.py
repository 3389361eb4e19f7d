"""How often server and sites exchange messages: an exchange takes seconds, whatever is in it."""

from __future__ import annotations

from fedlightning.callbacks import FENDA
from fedlightning.wire import read
from tests.engines.sites.helpers import Line, at_sites, sites, tasks_in


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
    arguments = {"sanity_check": True, "test_data": ["local"]}
    line = Line(sites(tmp_path / "sites", FENDA(head="head"), **arguments))
    heard = Heard(line)
    trainer = at_sites(line, tmp_path / "server", FENDA(head="head"), **arguments)
    trainer.test(verbose=False)
    before = heard.before("Visit")
    assert exchanges(before) == 2 and heard.count("describe") == 0
    assert heard.count("TryStep") == 2 and heard.count("hello") == 2
    assert trainer.summary["data"]["clients"]
