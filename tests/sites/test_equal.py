"""A federation of sites is that of one process, bit for bit, and nothing but bytes in our format passes between them."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import (
    FENDA,
    QSGD,
    SCAFFOLD,
    ClientDP,
    Ditto,
    FedBN,
    GlobalCheckpoint,
    LocalCheckpoint,
    SampleDP,
    TopK,
)
from fedlightning.contract.messages import Update, tree_bytes
from fedlightning.engines.attempts import FederationError
from fedlightning.engines.contract import Visit
from fedlightning.resume.config_changes import ConfigChanges
from fedlightning.testing.runs import same_tree
from tests.conformance.case import Case, collect
from tests.sites.helpers import REFUSED, Line, answers_in, at_sites, exported, sites, tasks_in, together

KEEP = (LocalCheckpoint(monitor="val_loss", mode="min"), GlobalCheckpoint(monitor="val_loss", mode="min"))


def rows(trainer):
    return sorted(str(row) for row in trainer.rows if row.data != "pooled")


def files(folder):
    """Return what exported files hold, and which are links to the global one."""
    whole = folder / "global.ckpt"
    return {
        path.name: (torch.load(path, weights_only=True), whole.exists() and path.samefile(whole))
        for path in sorted(folder.rglob("*.ckpt"))
    }


def assert_equal(tmp_path, algorithm, public=False, export=False, **arguments):
    one = together(tmp_path / "one", algorithm, **arguments)
    site_arguments = {name: value for name, value in arguments.items() if name != "evaluation"}
    line = Line(sites(tmp_path / "sites", algorithm, export=export, **site_arguments))
    other = at_sites(line, tmp_path / "server", algorithm, public=public, export=export, **arguments)
    assert same_tree(one.server.models, other.server.models)
    assert same_tree(one.server.state, other.server.state)
    assert rows(one) == rows(other)
    first = exported(one.run.path / "checkpoints" / "clients")
    second = {}
    for place in ("0", "1"):
        for folder in (tmp_path / "sites" / place / "models").glob("*"):
            second |= exported(folder)
    assert same_tree(first, second)
    folders = [trainer.run.path / "checkpoints" for trainer in (one, other)]
    if export:
        assert same_tree(files(folders[0]), files(folders[1]))
        assert not (folders[1] / "clients.json").exists()
    else:
        assert not list(other.run.path.glob("checkpoints/clients/*.ckpt"))
    return one, other, line


@pytest.mark.parametrize(
    "algorithm, others",
    [(None, KEEP), (SCAFFOLD(), ()), (FENDA(head="head"), KEEP[:1]), (Ditto(), ())],
    ids=["FedAvg", "SCAFFOLD", "FENDA", "Ditto"],
)
@pytest.mark.fast_cases(2)
def test_equal_to_one_process(tmp_path, algorithm, others):
    assert_equal(tmp_path, algorithm, others=others)


@pytest.mark.parametrize("algorithm", [QSGD(), TopK(share=0.2)], ids=lambda one: one.key)
def test_codes_are_decoded_at_the_server(tmp_path, algorithm):
    one, other, _ = assert_equal(tmp_path, algorithm)
    assert one.summary["bytes_up"] == other.summary["bytes_up"] < one.summary["bytes_down"]


@pytest.mark.filterwarnings("ignore:SampleDP")
def test_noise_is_added_at_the_site(tmp_path):
    pytest.importorskip("opacus", reason="SampleDP counts with Opacus")
    algorithm = SampleDP(delta=1e-3, noise_multiplier=1.0, noise_seed=0)
    line = Line(sites(tmp_path / "sites", algorithm))
    updates = []
    line.reply = lambda name, data: (updates.extend(one for one in answers_in(data) if isinstance(one, Update)), data)[
        1
    ]
    other = at_sites(line, tmp_path / "server", algorithm)
    one = together(tmp_path / "one", algorithm)
    assert same_tree(one.server.models, other.server.models) and same_tree(one.server.state, other.server.state)
    assert updates and not any(update.metrics or update.logs for update in updates)


@pytest.mark.filterwarnings("ignore:ClientDP")
def test_clients_clip_and_count_at_the_site(tmp_path):
    pytest.importorskip("opacus", reason="ClientDP counts with Opacus")
    algorithm = ClientDP(delta=1e-3, noise_multiplier=1.0, noise_seed=0, quantile=0.5, clip=0.01)
    one, other, _ = assert_equal(tmp_path, algorithm)
    assert same_tree(one.server.state, other.server.state)
    assert not [row for row in other.rows if row.split in ("train", "val")]


@pytest.mark.filterwarnings("ignore:SampleDP")
def test_sites_count_where_no_server_can_make_them_forget(tmp_path):
    pytest.importorskip("opacus", reason="SampleDP counts with Opacus")
    forgetting, counting = (
        SampleDP(delta=1e-3, noise_multiplier=1.0, ledger=one) for one in (None, str(tmp_path / "l"))
    )
    with pytest.raises(ValueError, match="needs ledger=FOLDER"):
        at_sites(Line(sites(tmp_path / "one", forgetting)), tmp_path / "first", forgetting)
    at_sites(Line(sites(tmp_path / "two", counting)), tmp_path / "second", counting)
    assert len(list((tmp_path / "l").glob("*.json"))) == 4


@pytest.mark.filterwarnings("ignore:SampleDP")
@pytest.mark.parametrize("changed", ["model.lr", "hash of the training data", None])
def test_a_site_that_was_changed_goes_on_with_no_private_run(tmp_path, changed, monkeypatch):
    """Whatever the server says: a round that was cut off would be released again of the same batches and noise."""
    pytest.importorskip("opacus", reason="SampleDP counts with Opacus")
    algorithm = SampleDP(delta=1e-3, noise_multiplier=1.0, ledger=str(tmp_path / "ledger"))
    at_sites(Line(sites(tmp_path / "sites", algorithm)), tmp_path / "server", algorithm)
    monkeypatch.setattr(
        "fedlightning.resume.resumable.changes_since", lambda *_, **__: ConfigChanges()
    )  # the server lies
    lr = {"lr": 0.05} if changed == "model.lr" else {}
    there = sites(tmp_path / "sites", algorithm, max_rounds=3, **lr)
    if changed == "hash of the training data":
        for site in there.values():
            site._data.whole.data["site0", "train"].tensors[0][0] += 1.0
            site._data.whole.data["site1", "train"].tensors[0][0] += 1.0
    again = {"resume": True, "max_rounds": 3, **lr}
    if changed is None:
        assert at_sites(Line(there), tmp_path / "server", algorithm, **again).rounds_done == 3
        return
    told = rf"A site does not take part: SampleDP cannot go on with another configuration \({changed} was"
    with pytest.warns(UserWarning, match=told), pytest.raises(FederationError, match="no client could contribute"):
        at_sites(Line(there), tmp_path / "server", algorithm, **again)


def test_equal_with_every_kind_of_entry(tmp_path):
    assert_equal(tmp_path, FedBN(), full=True)


@pytest.mark.parametrize(
    "algorithm, others", [(None, KEEP), (None, ()), (FENDA(head="head"), ())], ids=["kept", "global", "wrapped"]
)
@pytest.mark.fast_cases(1)
def test_models_that_are_sent_are_the_files_of_one_process(tmp_path, algorithm, others):
    assert_equal(tmp_path, algorithm, others=others, export=True)


def test_what_is_counted_is_what_is_sent(tmp_path):
    """The payloads of visits, taken from the bytes on the line, are the summary's traffic."""
    line, down, up = Line(sites(tmp_path / "sites")), [], []
    line.watch = lambda node, data: (down.extend(tasks_in(data)), data)[1]
    line.reply = lambda name, data: (up.extend(answers_in(data)), data)[1]
    trainer = at_sites(line, tmp_path / "server")
    visits = [task.message for task in down if isinstance(task, Visit)]
    updates = [answer for answer in up if isinstance(answer, Update)]
    assert len(visits) == len(updates) == 8
    assert sum(tree_bytes(one.state) + tree_bytes(one.extras) for one in visits) == trainer.summary["bytes_down"]
    assert sum(tree_bytes(one.state) + tree_bytes(one.extras) for one in updates) == trainer.summary["bytes_up"]


CASES: dict[str, Case] = collect("CASES")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_the_catalogue(tmp_path, name):
    """Every method runs at sites with the same bits; test_refused.py has those that do not run."""
    case = CASES[name]
    arguments = {key: value for key, value in case.arguments.items() if key not in ("max_rounds", "evaluation")}
    assert_equal(tmp_path, case.algorithm, public=True, export=True, **arguments)
