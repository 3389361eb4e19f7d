"""Statistics before round 1: asked once, of those who train, kept in the run, and the same where the clients are sites."""

from __future__ import annotations

import json

import pytest
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import ClientDP, SampleDP
from fedlightning.datamodules import ValidatedOnTest
from fedlightning.models import Classifier, LogisticRegression
from fedlightning.options import Evaluation, FailurePolicy, Processes
from fedlightning.sites.engine import DataElsewhere
from fedlightning.sites.link import connected
from fedlightning.sites.site import Site
from fedlightning.testing.runs import same_tree
from fedlightning.wire import read
from tests.datamodules.test_agreed_statistics import stays, write_table
from tests.sites.helpers import Line, on_clock_of

RUN = {
    "max_rounds": 2,
    "local_steps": 2,
    "logger": False,
    "enable_progress_bar": False,
    "save_state": 1,
    "evaluation": Evaluation(test_data=["local"]),
}
FEATURES = 11


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "t.csv")


def module():
    torch.manual_seed(0)
    return Classifier(LogisticRegression(FEATURES, 2), 2)


def run(root, data, **given):
    trainer = FederatedTrainer(default_root_dir=root, **RUN | given)
    trainer.fit(module(), data)
    return trainer


def test_a_run_keeps_them_and_goes_on_with_them(tmp_path, table):
    whole = run(tmp_path / "one", stays(table))
    kept = json.loads((whole.run.path / "statistics.json").read_text())
    assert set(kept) == {"wanted", "clients", "totals"} and list(kept["clients"]) == list("abcd")
    assert "rare" not in json.dumps(kept)
    assert kept["totals"]["words dx"] == {"E11": 0.0, "I10": 0.0}  # neither others nor counts
    half = run(tmp_path / "two", stays(table), max_rounds=1)
    more = FederatedTrainer(default_root_dir=tmp_path / "two", **RUN)
    more.fit(module(), stays(table), resume=half.run.path, allow_config_change=True)
    assert same_tree(whole.server.models, more.server.models)
    assert not any(value.isnan().any() for value in whole.server.model.values())
    again = FederatedTrainer(default_root_dir=tmp_path, **RUN)
    again.restore(module(), stays(table), whole.run.path)
    assert [row["mean"] for row in again.test(verbose=False)] == [row["mean"] for row in whole.test(verbose=False)]


def test_another_cohort_is_not_asked_again(tmp_path, table):
    first = run(tmp_path / "one", stays(table), max_rounds=1)
    more = FederatedTrainer(default_root_dir=tmp_path / "one", **RUN)
    with pytest.raises(ValueError, match="Sums of both would tell the difference"):
        more.fit(module(), stays(write_table(table, rows=42)), resume=first.run.path, allow_config_change=True)
    with pytest.raises(ValueError, match="agreed on the statistics"):
        more.fit(module(), stays(table, least=6), resume=first.run.path, allow_config_change=True)


def test_a_held_out_site_gives_nothing_and_is_scaled_as_the_others(tmp_path, table):
    trainer = run(tmp_path, stays(table), held_out=["d"])
    assert list(trainer.federation.engine.statistics["clients"]) == ["a", "b", "c"]
    x, _ = next(iter(trainer.federation.engine.runner.data.client_dataloader("d", "test")))
    assert not x.isnan().any()


def test_two_sites_are_refused_with_a_way_out(tmp_path, table):
    with pytest.raises(ValueError, match=r"at 2 sites; sums take 3 or more.*scale: local"):
        run(tmp_path, stays(table), held_out=["c", "d"])


@pytest.mark.parametrize(
    "callback",
    [SampleDP(delta=1e-5, epsilon=1.0), ClientDP(delta=1e-5, noise_multiplier=1.0, rate=1.0)],
    ids=lambda one: one.key,
)
def test_under_a_guarantee_they_are_refused(tmp_path, table, callback):
    with pytest.raises(ValueError, match=f"{callback.key} accounts for updates only.*scale: local or none"):
        run(tmp_path, stays(table), callbacks=[callback])


def test_a_dry_run_has_them(tmp_path, table):
    trainer = FederatedTrainer(default_root_dir=tmp_path, **RUN)
    assert not trainer.dry_run(module(), stays(table)).problems


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_engines_agree(tmp_path, table, engine):
    one, other = run(tmp_path / "1", stays(table)), run(tmp_path / "2", stays(table), engine=engine)
    kept = [(trainer.run.path / "statistics.json").read_text() for trainer in (one, other)]
    assert kept[0] == kept[1] and one.federation.engine.statistics == other.federation.engine.statistics
    for name, value in one.server.model.items():
        torch.testing.assert_close(value, other.server.model[name], rtol=1e-4, atol=1e-5)


# -- sites ---------------------------------------------------------------------------------------------------------------
def at_home(root, hospital, **options):
    root.mkdir(parents=True, exist_ok=True)
    trainer = FederatedTrainer(**RUN)
    data = stays(write_table(root / "own.csv", only=hospital), **options)
    return Site(f"home of {hospital}", trainer.blueprint(module()), data, root)


def line_of(root, hospitals="abcd", **options):
    return Line({hospital: at_home(root / hospital, hospital, **options.get(hospital, {})) for hospital in hospitals})


def serve(line, root, **given):
    with connected(line, False, False), on_clock_of(line):
        return run(root, DataElsewhere(), engine="flower", failures=FailurePolicy(timeout=30.0), **given)


def test_sites_have_the_bits_of_one_process_and_no_row_leaves(tmp_path, table):
    one = run(tmp_path / "one", stays(table))
    line, sent = line_of(tmp_path / "sites"), list[bytes]()
    line.reply = lambda name, data: (sent.append(data), data)[1]
    other = serve(line, tmp_path / "server")
    assert same_tree(one.server.models, other.server.models)
    totals = [json.loads((trainer.run.path / "statistics.json").read_text())["totals"] for trainer in (one, other)]
    assert totals[0] == totals[1]
    given = [read(data)["answer"] for data in sent if b"moments age" in data]
    assert len(given) == 4 and all(len(answer) == 1 for answer in given)
    for answer in given:
        (sums,) = answer.values()
        assert {name: len(value) for name, value in sums.items() if isinstance(value, list)} == {
            "moments age": 3,
            "bins lactate": 102,
        }
        assert all(count >= 5 for count in sums["words dx"].values())
    rows = {line.rsplit(",", 3)[0].encode() for line in table.read_text().splitlines()[1:]}
    patients = {f"{hospital}{i}".encode() for hospital in "abcd" for i in range(10, 20)}
    assert not any(row in data for data in sent for row in rows) and b"rare" not in b"".join(sent)
    assert not any(b"\x03" + patient in data for data in sent for patient in patients)


def test_a_site_that_starts_anew_is_told_again(tmp_path, table):
    line = line_of(tmp_path / "sites")
    seen = []

    def watch(node, data):
        asked = read(data)
        if asked["do"] == "tasks" and len(seen) == 3:
            line.sites["a"] = at_home(tmp_path / "sites" / "a", "a").answer
        seen.append(asked["do"]) if asked["do"] == "tasks" else None
        return data

    line.watch = watch
    other = serve(line, tmp_path / "server")
    assert same_tree(run(tmp_path / "one", stays(table)).server.models, other.server.models)


def test_a_site_gives_sums_of_one_cohort_only(tmp_path):
    serve(line_of(tmp_path / "sites"), tmp_path / "server")
    line = line_of(tmp_path / "sites")
    serve(line, tmp_path / "again")  # the same cohort: no more is told
    changed = tmp_path / "sites" / "a" / "own.csv"
    line = line_of(tmp_path / "sites")
    changed.write_text("\n".join(changed.read_text().splitlines()[:-8]))
    with pytest.raises(ValueError, match="'a' of site 'home of a' has given other sums of 'age'"):
        serve(line, tmp_path / "other")


def test_sites_that_want_other_statistics_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"different statistics.*Give every site the same scale"):
        serve(line_of(tmp_path / "sites", b={"least": 6}), tmp_path / "server")


def test_newcomers_are_scaled_by_what_was_agreed(tmp_path, table):
    trainer = run(tmp_path / "run", stays(table))
    rows = trainer.onboard(stays(write_table(tmp_path / "new.csv", hospitals="e", rows=60)), verbose=False)
    assert rows and all(row["mean"] == row["mean"] for row in rows if row["metric"].endswith("loss"))


def test_a_dry_run_with_a_held_out_site(tmp_path, table):
    trainer = FederatedTrainer(default_root_dir=tmp_path, held_out=["d"], **RUN)
    assert not trainer.dry_run(module(), stays(table)).problems


def test_wrapped_data_agree_too(tmp_path, table):
    trainer = run(tmp_path, ValidatedOnTest(stays(table)), held_out=["d"])
    assert not any(value.isnan().any() for value in trainer.server.model.values())


@pytest.mark.slow
def test_processes_have_the_same_bits(tmp_path, table):
    one, other = run(tmp_path / "1", stays(table)), run(tmp_path / "2", stays(table), engine=Processes(2))
    assert same_tree(one.server.models, other.server.models)
