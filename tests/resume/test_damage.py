"""Damage to the files of a run is noticed, and never ends in other numbers without a word."""

from __future__ import annotations

import shutil

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts
from fedlightning.callbacks import SCAFFOLD, LocalCheckpoint
from fedlightning.errors import DamagedStateError
from fedlightning.resume.state_files import BEFORE, MANIFEST
from fedlightning.run.folder import DamagedMetricsError
from tests.helpers import Toy, make_trainer, same, toy_data


class Stop(FederatedCallback):
    """Interrupts a run before a round."""

    facts = Facts(takes_part=False)

    def __init__(self, round):
        self.round = round

    def on_round_start(self, server):
        if server.round == self.round:
            raise KeyboardInterrupt


def make(root, *more, rounds=5):
    algorithms = [SCAFFOLD(), LocalCheckpoint(), *more]
    return make_trainer(root, algorithms, max_rounds=rounds, name="run", participation=2, seed=3)


def toy():
    torch.manual_seed(0)
    return Toy("sgd")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that ended after three of five rounds, and the whole of it."""
    root = tmp_path_factory.mktemp("damage")
    with pytest.raises(KeyboardInterrupt):
        make(root / "cut", Stop(3)).fit(toy(), datamodule=toy_data())
    whole = make(root / "whole")
    whole.fit(toy(), datamodule=toy_data())
    return root / "cut", whole


def go_on(root):
    trainer = make(root)
    trainer.fit(toy(), datamodule=toy_data(), resume="last")
    return trainer


def same_run(one, other):
    same(one.server.model, other.server.model)
    assert one.rows == other.rows


def cut_off(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {"cut off": cut_off, "changed": changed, "missing": lambda path: path.unlink()}
NEWEST = [MANIFEST, "server-000003.safetensors", "records-000003-0.safetensors"]


def copy_of(interrupted, tmp_path):
    shutil.copytree(interrupted[0], tmp_path / "runs")
    return tmp_path / "runs", tmp_path / "runs" / "run" / "version_0" / "checkpoints" / "last"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", NEWEST)
def test_a_damaged_newest_state_gives_way_to_the_one_before(interrupted, tmp_path, name, damage):
    root, last = copy_of(interrupted, tmp_path)
    if name == MANIFEST and damage == "changed":
        (last / name).write_text((last / name).read_text().replace("{", "<", 1))
    else:
        DAMAGES[damage](last / name)
    with pytest.warns(UserWarning, match=r"is damaged: .* The state before it, after round 2, is used"):
        trainer = go_on(root)
    same_run(trainer, interrupted[1])


def test_a_manifest_that_is_none_gives_way_too(interrupted, tmp_path):
    root, last = copy_of(interrupted, tmp_path)
    (last / MANIFEST).write_text("{}")
    with pytest.warns(UserWarning, match=r"manifest\.json is not a manifest\. The state before it"):
        same_run(go_on(root), interrupted[1])


def test_what_both_states_need_cannot_be_damaged_silently(interrupted, tmp_path):
    root, last = copy_of(interrupted, tmp_path)
    changed(last / "template.safetensors")
    with pytest.raises(DamagedStateError, match=r"template\.safetensors is not the file that was written"):
        go_on(root)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_are_refused(interrupted, tmp_path, damage):
    root, _ = copy_of(interrupted, tmp_path)
    DAMAGES[damage](root / "run" / "version_0" / "metrics.csv")
    with pytest.raises(DamagedMetricsError, match=r"metrics\.csv (was|is) .*: the saved state knows"):
        go_on(root)


def test_undamaged_it_goes_on_to_the_same_result(interrupted, tmp_path):
    root, last = copy_of(interrupted, tmp_path)
    assert (last / BEFORE).exists()
    same_run(go_on(root), interrupted[1])


def test_records_are_rewritten_before_the_disk_holds_three_of_each(tmp_path):
    trainer = make(tmp_path, rounds=12)
    trainer.fit(toy(), datamodule=toy_data())
    last = trainer.run.last
    assert len(list(last.glob("records-*.safetensors"))) <= 4
    assert not list(last.glob("*.tmp"))


def edited(path):
    """The newest manifest of 3 rounds, with one digit of it changed: valid JSON all the same."""
    text = path.read_text()
    assert '"rounds_done": 3' in text
    path.write_text(text.replace('"rounds_done": 3', '"rounds_done": 2', 1))


def test_a_digit_changed_in_the_manifest_is_noticed(interrupted, tmp_path):
    cut, whole = interrupted
    shutil.copytree(cut, tmp_path, dirs_exist_ok=True)
    edited(next(tmp_path.glob(f"run/*/checkpoints/last/{MANIFEST}")))
    with pytest.warns(UserWarning, match=r"is not a manifest: it is not what was written.* after round 2, is used"):
        same_run(go_on(tmp_path), whole)


def test_resume_auto_goes_on_from_the_state_before_and_discards_nothing(interrupted, tmp_path):
    cut, whole = interrupted
    shutil.copytree(cut, tmp_path, dirs_exist_ok=True)
    (run,) = (tmp_path / "run").iterdir()
    (run / "checkpoints" / "last" / MANIFEST).unlink()
    visited = []

    class Visits(FederatedCallback):
        facts = Facts(takes_part=False)

        def on_round_start(self, server):
            visited.append(server.round)

    trainer = make_trainer(
        tmp_path,
        [SCAFFOLD(), LocalCheckpoint(), Visits()],
        max_rounds=5,
        name="run",
        version=run.name,
        participation=2,
        seed=3,
    )
    with pytest.warns(UserWarning, match="after round 2, is used"):
        trainer.fit(toy(), datamodule=toy_data(), resume="auto")
    assert visited == [2, 3, 4]
    same_run(trainer, whole)
