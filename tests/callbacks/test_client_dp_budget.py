"""What ClientDP counts in a ledger: a run that is copied, a ledger that forgets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("opacus", reason="ClientDP counts with Opacus: pip install opacus cryptography")

from fedlightning.algorithm import FederatedCallback
from fedlightning.callbacks import ClientDP
from tests.callbacks.test_client_dp import SIZES, dp, module
from tests.helpers import federate, make_trainer, toy_data

pytestmark = pytest.mark.filterwarnings("ignore:ClientDP")


class Between(FederatedCallback):
    """Changes the ledger before a run's last round, and lets a client fail in it."""

    path, change, failing = None, None, None

    def on_round_start(self, server):
        if server.round == 2 and self.change is not None:
            self.change(self.path / "ledger" / "clients.json")

    def on_send(self, client, update):
        if client.round == 2 and client.id == self.failing:
            raise RuntimeError("no power")


def ledger_run(path, name, rounds=3, change=None, failing=None, **options):
    Between.path, Between.change, Between.failing = path, staticmethod(change) if change else None, failing
    callback = dp(noise_seed=None, ledger=str(path / "ledger"))
    trainer = make_trainer(path, [callback, Between()], max_rounds=rounds, name=name, failures="skip")
    trainer.fit(module(), datamodule=toy_data(SIZES), **options)
    return json.loads((trainer.run.path / "privacy.json").read_text())


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text('{"runs": {}}')], ids=["gone", "edited"])
def test_a_ledger_that_forgets_during_a_run_ends_it(change, tmp_path):
    """What other runs have spent is gone with it: epsilon would be that of this run alone."""
    ledger_run(tmp_path, "first")
    with pytest.raises(ValueError, match=r"clients.json has lost what this run has spent before: .* restore it"):
        ledger_run(tmp_path, "second", change=change)


def test_a_copy_of_a_run_releases_no_round_a_second_time(tmp_path):
    """The same secret, the same draw and another mean in round 3: two releases of one draw are not two independent ones."""
    ledger_run(tmp_path, "one", rounds=2)
    for name in ("two", "behind"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    first = ledger_run(tmp_path, "one", failing="0", resume="last")
    assert first["epsilon"] == pytest.approx(dp().epsilon_after(3))
    with pytest.raises(ValueError, match=r"Round 3 was released before, by this run or a copy of it"):
        ledger_run(tmp_path, "two", failing="1", resume="last")
    second = ledger_run(tmp_path, "two", failing="0", resume="last")
    assert second["epsilon"] == first["epsilon"]
    ledger_run(tmp_path, "one", rounds=4, resume="last")
    behind = ledger_run(tmp_path, "behind", failing="0", resume="last")  # its third round, where another copy has four
    assert behind["rounds"] == 3 and behind["epsilon"] == pytest.approx(dp().epsilon_after(4))
    again = ledger_run(tmp_path, "three", rounds=1)
    assert again["epsilon"] == pytest.approx(dp().epsilon_after(5))


def test_two_copies_that_release_one_round_at_the_same_time_do_not_both(tmp_path, monkeypatch):
    """Each had looked before the other wrote: two releases of a round, and a budget for one."""
    callback = dp(noise_seed=None, ledger=str(tmp_path / "ledger"))
    names = {f"00000000{letter * 24}" for letter in "ab"}
    monkeypatch.setattr(ClientDP, "_releases", lambda self, server: set())
    spend = ClientDP._spend

    def late(self, server, release):
        with self._ledger(server).hold([(1.0, 1.0, 1)], min(names)):
            pass  # the copy, since this one has looked
        spend(self, server, release)

    monkeypatch.setattr(ClientDP, "_spend", late)
    with pytest.raises(ValueError, match="Round 1 is being released by a copy of this run too"):
        federate(module(), toy_data(SIZES), [callback], max_rounds=1)


def test_a_release_is_not_named_by_the_data_alone(tmp_path):
    """A hash of the exact mean told readers of the folder which of two data sets it is of."""
    names = set()
    for run in ("a", "b"):
        ledger_run(tmp_path, run, rounds=1)
        names.add((tmp_path / run / "version_0" / "privacy.csv").read_text().splitlines()[-1].rpartition(",")[2])
    assert len(names) == 2 and all(name.startswith("00000000") for name in names)
