"""A site that joins a run when it is resumed, and what a site does with its models alone."""

from __future__ import annotations

import pytest
import torch

from fedlightning import load
from fedlightning.callbacks import SCAFFOLD
from fedlightning.datamodules.held_out import exclude_clients
from fedlightning.testing.runs import same_tree
from fedlightning.testing.toys import ToyData, federate
from tests.sites.helpers import RUN, SHARES, Line, a_site, at_sites
from tests.sites.test_equal import rows


def parts(root, count, **arguments):
    shares = ((*SHARES[0],), ("site1",), ("site2",))[:count]
    return {str(number): a_site(root / str(number), shares[number], SCAFFOLD(), **arguments) for number in range(count)}


def test_a_site_joins_when_the_run_is_resumed(tmp_path):
    """As new clients join in one process; the sites that were there go on with the records that they have."""
    few = exclude_clients(ToyData(), ["site2"])
    federate(SCAFFOLD(), few, tmp_path / "one", **RUN | {"max_rounds": 2})
    one = federate(SCAFFOLD(), ToyData(), tmp_path / "one", resume="join", **RUN | {"max_rounds": 4})
    at_sites(Line(parts(tmp_path / "sites", 2)), tmp_path / "server", SCAFFOLD(), max_rounds=2)
    line = Line(parts(tmp_path / "sites", 3, max_rounds=4))
    other = at_sites(line, tmp_path / "server", SCAFFOLD(), resume="join", max_rounds=4)
    assert "site2" in other.server.clients and other.rounds_done == 4
    assert same_tree(one.server.models, other.server.models)
    assert same_tree(one.server.state, other.server.state)
    assert rows(one) == rows(other)


def test_a_site_that_nobody_said_may_join_is_refused(tmp_path):
    at_sites(Line(parts(tmp_path / "sites", 2)), tmp_path / "server", SCAFFOLD(), max_rounds=2)
    with pytest.raises(ValueError, match="allow_new_clients"):
        at_sites(
            Line(parts(tmp_path / "sites", 3, max_rounds=4)), tmp_path / "server", SCAFFOLD(), resume=True, max_rounds=4
        )


def test_no_model_of_an_earlier_end_stays_where_the_models_go_elsewhere(tmp_path):
    """A run that is given more rounds ends anew: what its first end left in the server's folder would be read as its last."""

    def ends(export, rounds):
        line = Line(parts(tmp_path / "sites", 2, max_rounds=rounds, export=export))
        trainer = at_sites(
            line, tmp_path / "server", SCAFFOLD(), resume=rounds > 1, export=export, max_rounds=rounds, evaluation=0
        )
        folder = trainer.run.path / "checkpoints"
        return len(list(folder.glob("clients/*.ckpt"))), (folder / "clients.json").exists()

    assert [ends(True, 1), ends(False, 2), ends(True, 3)] == [(3, False), (0, True), (3, False)]


def test_a_site_opens_its_own_models(tmp_path):
    at_sites(Line(parts(tmp_path / "sites", 2)), tmp_path / "server", SCAFFOLD(), max_rounds=2)
    (path,) = (tmp_path / "sites" / "1" / "models").glob("*/site1.ckpt")
    assert load(path, trust=["fedlightning.testing.toys"])(torch.zeros(2, 6)).shape == (2, 3)
