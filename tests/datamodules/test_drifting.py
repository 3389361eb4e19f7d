import copy
import warnings
from dataclasses import fields, replace
from datetime import date
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedlightning import FederatedTrainer
from fedlightning.algorithm import FederatedCallback
from fedlightning.callbacks import Central, FedBuff, FedGKT, FedType, FeSEM, SampleDP
from fedlightning.client.data_summary import describe
from fedlightning.datamodules import (
    DriftingDataModule,
    IIDPartitioner,
    LazyClients,
    Partitioned,
    ShiftedDataModule,
    TabularFederatedDataModule,
)
from fedlightning.datamodules.drifting import in_time
from fedlightning.datamodules.held_out import exclude_clients
from fedlightning.models import MLP, Classifier
from fedlightning.onboarding.onboarding import Onboarding
from fedlightning.options import Evaluation, FailurePolicy, Processes
from fedlightning.server.loop import Synchronous
from fedlightning.sites.engine import DataElsewhere
from fedlightning.sites.link import connected
from fedlightning.sites.site import Site
from fedlightning.testing.runs import same_tree
from fedlightning.virtual_time import SampleSpeed, VirtualClock
from fedlightning.virtual_time.asynchronous import Asynchronous
from tests.helpers import Spy, Toy, ToyData, global_state, make_trainer, mean_of, same, toy_data
from tests.sites.helpers import Line

SIZES = (24, 40, 17)
ROWS = 30


def drifting(windows=3, sizes=SIZES, **options):
    data = DriftingDataModule(toy_data(sizes), windows=windows, **options)
    data.setup()
    return data


def fit(data, root=None, callbacks=(), module=None, **options):
    torch.manual_seed(0)
    spy = Spy()
    trainer = make_trainer(root, [spy, *callbacks], **{"max_rounds": 4, "local_epochs": 1} | options)
    trainer.fit(module or Toy(), datamodule=data)
    return trainer, spy


@pytest.fixture
def table(tmp_path):
    """Two hospitals; the rows of each are not in the order of their days, of which some are equal."""
    path, draw = tmp_path / "stays.csv", np.random.default_rng(0)
    days = [f"2020-{1 + day // 28:02d}-{1 + day % 28:02d}" for day in draw.integers(0, 300, 2 * ROWS)]
    rows = [f"{i % 2},{day},{i},{i % 3 // 2}" for i, day in enumerate(days)]
    path.write_text("\n".join(["hospital,day,x,ill", *rows]))
    return path


def stays(path, **options):
    return TabularFederatedDataModule(
        path, "ill", client="hospital", drop=["day"], scale="none", batch_size=4, **options
    )


# -- windows -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("memory", [1, 2, None])
def test_windows_partition_the_samples_in_the_order_of_time(memory):
    data, source = drifting(3, every=2, memory=memory), toy_data(SIZES)
    source.setup()
    for client in data.client_ids:
        held = source.indices(client)
        places = np.arange(len(held)) * 3 // len(held)
        for round in range(8):
            now = min(round // 2, 2)
            first = 0 if memory is None else max(0, now - memory + 1)
            found = data.at_round(round).indices(client)
            assert np.array_equal(found, held[(places >= first) & (places <= now)])
            assert len(found) == data.at_round(round).num_samples(client)
            assert sum(data.at_round(round).class_counts(client)) == len(found)
        assert np.array_equal(data.indices(client), held)


def test_a_column_of_days_orders_the_rows_and_equal_days_stay_together(table):
    source = stays(table)
    data = DriftingDataModule(stays(table), by="day", windows=4)
    source.setup(), data.setup()
    for client in "01":
        days = [data.at_round(round).sample_values(client, "train", "day") for round in range(4)]
        assert sorted(day for one in days for day in one) == sorted(source.sample_values(client, "train", "day"))
        assert all(max(one) < min(other) for one, other in pairwise(days))
        for split in ("val", "test"):
            every = source.sample_values(client, split, "day")
            assert data.sample_values(client, split, "day") == [day for day in every if day >= min(days[-1])]
    assert "by day" in data.partition_name and data.columns == source.columns


def test_without_times_the_order_is_that_of_the_data_set_however_a_client_lists_its_samples():
    source = toy_data((9, 6))
    source.setup()
    train = source._splits["train"]
    source._splits["train"] = replace(train, indices=[train.indices[0][[5, 2, 8, 0, 7, 1, 4, 6, 3]], train.indices[1]])
    data = DriftingDataModule(source, windows=3)
    data.setup()
    assert [sorted(data.at_round(round).indices("0").tolist()) for round in range(3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]


def test_what_the_source_does_is_done_with_windows():
    class Grouped(ToyData):
        planted_groups = {"0": 1, "1": 0, "2": 1}
        datamodule = "the user's own"
        prepared = False

        def prepare_data(self):
            self.prepared = True

    source = Grouped(toy_data(SIZES).tensors, drop_last=True)
    source.seed, source.collate_fn = 5, tuple
    data = DriftingDataModule(source, windows=2)
    data.prepare_data()
    data.setup()
    assert (
        source.prepared
        and data.at_round(1).planted_groups == Grouped.planted_groups
        and data.datamodule == "the user's own"
    )
    assert data.original is source.original
    assert data.seed == 5 and [type(one) for one in data.at_round(0).client_dataloader("0", "train")] == [tuple]


def test_common_starts_cut_all_clients_at_the_same_times(table):
    data = DriftingDataModule(stays(table), by="day", starts=["2020-04-01", "2020-08-01"], scored="all")
    data.setup()
    for client in "01":
        first, second, third = (data.at_round(round).sample_values(client, "train", "day") for round in range(3))
        assert max(first) < "2020-04-01" <= min(second) <= max(second) < "2020-08-01" <= min(third)
    assert data.num_samples("0", "test") == data.source.num_samples("0", "test")


def test_sizes_are_told_until_the_last_window_begins():
    data = drifting(3, every=2)
    for client in data.client_ids:
        assert data.sizes_by_round(client) == [data.at_round(round).num_samples(client) for round in range(5)]


def test_windows_as_clients_say_how_different_they_are():
    data = drifting(3, sizes=(30, 30))
    windows = data.by_window()
    assert windows.client_ids == ["1", "2", "3"]
    held = [set(windows.indices(client).tolist()) for client in windows.client_ids]
    assert held == [
        {index for client in data.client_ids for index in data.at_round(round).indices(client).tolist()}
        for round in range(3)
    ]


# -- runs --------------------------------------------------------------------------------------------------------------
def test_one_window_is_no_drift_bit_for_bit(tmp_path):
    plain, _ = fit(toy_data(SIZES), tmp_path / "plain", evaluation=Evaluation(test_data=["local"]))
    drift, _ = fit(drifting(1), tmp_path / "drift", evaluation=Evaluation(test_data=["local"]))
    same(global_state(plain), global_state(drift))
    assert [str(row) for row in plain.rows] == [str(row) for row in drift.rows]


@pytest.mark.parametrize("options", [{"local_epochs": 1}, {"local_epochs": None, "local_steps": 2}], ids=str)
def test_counts_weights_and_samples_are_those_of_the_round(options):
    data, seen = drifting(3), {}

    class Look(FederatedCallback):
        def on_visit_start(self, client):
            rows = torch.cat([x for x, _ in client.loader()])
            seen[client.round, client.id] = rows, client.class_counts, client.size(), client.num_samples

        def on_round_start(self, server):
            assert server.num_samples == {
                client: data.sizes_by_round(client)[min(server.round, 2)] for client in server.clients
            }

    trainer, spy = fit(data, callbacks=[Look()], **options)
    for round in range(4):
        updates, sizes = spy.of_round(round), {}
        for client in data.client_ids:
            here = data.at_round(round)
            rows, counts, size, used = seen[round, client]
            assert sorted(rows.tolist()) == sorted(
                here.source._splits["train"].dataset[here.indices(client)][0].tolist()
            )
            assert counts == here.class_counts(client)
            sizes[client] = size
            assert size == used == updates[client].num_samples == here.num_samples(client) == len(rows)
        same(spy.rounds[round], {**spy.rounds[round], **mean_of(updates, sizes)})
    assert trainer.server.num_samples["1"] == data.sizes_by_round("1")[-1]


def test_resumed_in_the_midst_of_windows(tmp_path):
    class Stop(Spy):
        def on_round_start(self, server):
            if server.round == 3 and not resumed:
                raise KeyboardInterrupt

    def go(root, **more):
        torch.manual_seed(0)
        trainer = make_trainer(root, [Stop()], max_rounds=5, save_state=1)
        trainer.fit(Toy("momentum"), datamodule=drifting(3, every=2, memory=2), **more)
        return trainer

    resumed = True
    whole = go(tmp_path / "whole")
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "parts")
    resumed = True
    parts = go(tmp_path / "parts", resume="last")
    same(global_state(whole), global_state(parts))
    assert (whole.run.path / "metrics.csv").read_bytes() == (parts.run.path / "metrics.csv").read_bytes()
    trainer = make_trainer(tmp_path / "parts", [Stop()], max_rounds=6, save_state=1)
    with pytest.raises(ValueError, match="data \\(train split\\)"):
        trainer.fit(Toy("momentum"), datamodule=drifting(3, every=1, memory=2), resume="last")


@pytest.mark.parametrize(
    "engine",
    ["vectorized", pytest.param("processes", marks=pytest.mark.slow)],
)
def test_engines_agree(engine):
    one, _ = fit(drifting(3))
    other, _ = fit(drifting(3), engine=Processes(2) if engine == "processes" else engine)
    for name, value in global_state(one).items():
        assert torch.allclose(value, global_state(other)[name], atol=0 if engine == "processes" else 1e-5)


def test_sites_have_the_bits_of_one_process(tmp_path, table):
    run = {"max_rounds": 3, "local_epochs": 1, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}

    def module():
        torch.manual_seed(0)
        return Classifier(MLP(1, [4], 2), num_classes=2)

    def data(path):
        return DriftingDataModule(stays(path), by="day", windows=2)

    def go(data, root, **more):
        trainer = FederatedTrainer(default_root_dir=root, evaluation=Evaluation(test_data=["local"]), **run | more)
        trainer.fit(module(), data)
        return trainer

    lines, parts = table.read_text().splitlines(), {}
    for hospital in "01":
        own = tmp_path / f"{hospital}.csv"
        own.write_text("\n".join([lines[0], *(line for line in lines[1:] if line[0] == hospital)]))
        blueprint = FederatedTrainer(**run).blueprint(module())
        parts[hospital] = Site(hospital, blueprint, data(own), tmp_path / hospital)
    one = go(data(table), tmp_path / "one")
    with connected(Line(parts), False, False):
        other = go(DataElsewhere(), tmp_path / "server", engine="flower", failures=FailurePolicy(timeout=30.0))
    assert same_tree(one.server.models, other.server.models)
    assert (
        one.server.num_samples
        == other.server.num_samples
        != {c: s[0] for c, s in other.server.population.sizes.items()}
    )


def test_a_pooled_job_trains_on_the_union_of_the_round():
    data = drifting(3)
    _, spy = fit(data, callbacks=[Central()])
    counts = [update.num_samples for update in spy.updates]
    assert counts == [len(data.at_round(round).pooled_dataloader("train").dataset) for round in range(4)]


@pytest.mark.parametrize(
    "options, seconds",
    [({"local_epochs": 2}, [30.0, 90.0]), ({"local_epochs": None, "local_steps": 2}, [15.0, 30.0])],
    ids=["epochs", "steps"],
)
def test_a_virtual_clock_counts_the_work_of_the_round(options, seconds):
    clock = VirtualClock(SampleSpeed(1.0))
    data, times = drifting(2, sizes=(12, 30), memory=None), []

    class Look(FederatedCallback):
        def on_round_end(self, server):
            times.append(server.costs.virtual_time)

    fit(data, callbacks=[Look()], max_rounds=2, loop=Synchronous(clock), **options)
    assert times == seconds


# -- what is around it -------------------------------------------------------------------------------------------------
def test_descriptions_and_wrapped_data_keep_the_drift():
    data = drifting(3)
    few = exclude_clients(data, ["1"])
    told = describe(few, left_out=["1"])
    assert told.over_rounds == {client: data.sizes_by_round(client) for client in data.client_ids}
    assert told.num_samples("0") == 24 and told.num_samples("0", "train", 1) == 8 == told.num_samples("0", round=99)
    assert few.at_round(0).num_samples("0") == 8 and few.at_round(0).client_ids == ["0", "2"]
    assert describe(toy_data_ready()).over_rounds == {}
    assert {field.name for field in fields(told)} >= {"over_rounds"}


def toy_data_ready():
    data = toy_data(SIZES)
    data.setup()
    return data


def test_fingerprints_tell_windows_apart():
    prints = {
        data.fingerprint("train")
        for data in (drifting(1), drifting(3), drifting(3, every=2), drifting(3, memory=None), drifting(3))
    }
    assert len(prints) == 4


@pytest.mark.parametrize(
    "callbacks, options, words",
    [
        ([SampleDP(delta=1e-3, noise_multiplier=1.0)], {}, "SampleDP plans its noise by the records"),
        ([FedType()], {}, "calibrates on samples of a client that never train"),
        ([FedGKT()], {}, "the server found in the round before"),
        ([FedBuff()], {"loop": Asynchronous(concurrency=2)}, "has no rounds in which all clients train"),
    ],
    ids=["SampleDP", "FedType", "FedGKT", "Asynchronous"],
)
def test_what_goes_by_samples_over_rounds_is_refused(callbacks, options, words):
    with pytest.raises(ValueError, match=words):
        make_trainer(None, callbacks, **options).fit(Toy(), datamodule=drifting(3))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda path: DriftingDataModule(LazyClients(2, lambda number: {}, {"train": 2}), windows=2), "LazyClients"),
        (lambda path: DriftingDataModule(toy_data(SIZES)), "give a number of windows"),
        (lambda path: DriftingDataModule(toy_data(SIZES), starts=[3]), "the column that they are of"),
        (lambda path: DriftingDataModule(stays(path), "day", 2, ["2020-03-01"]), "give a number of windows"),
        (lambda path: DriftingDataModule(drifting(2), windows=2), "would lose"),
        (lambda path: DriftingDataModule(stays(path, public=0.1), windows=2), "public data"),
        (lambda path: ShiftedDataModule(drifting(2), "noise", 1.0), "would lose"),
        (lambda path: Partitioned(drifting(2), IIDPartitioner(2)), "would lose"),
        (lambda path: DriftingDataModule(toy_data((2, 9)), windows=3), "client '0' without a training sample"),
        (lambda path: DriftingDataModule(stays(path), "day", starts=["2020-08-01", "2020-03-01"]), "become later"),
        (lambda path: DriftingDataModule(stays(path), "day", starts=["2020-08-01", "2020-08-01"]), "become later"),
        (lambda path: DriftingDataModule(stays(path), "hospital", windows=2), "without a training sample"),
        (lambda path: DriftingDataModule(toy_data(SIZES), "day", windows=2), "no columns such as 'day'"),
    ],
)
def test_what_cannot_drift_is_refused(table, make, words):
    with pytest.raises(ValueError, match=words):
        make(table).setup()


def test_scales_that_look_ahead_are_refused(table):
    local = TabularFederatedDataModule(table, "ill", client="hospital", drop=["day"])
    with pytest.raises(ValueError, match="scale: local"):
        DriftingDataModule(local, "day", windows=2).setup()
    federated = TabularFederatedDataModule(
        table, "ill", client="hospital", drop=["day"], scale="federated", ranges={"x": [0, 100]}, least=1
    )
    with pytest.raises(ValueError, match="scale: federated"):
        DriftingDataModule(federated, "day", windows=2).setup()


@pytest.mark.parametrize(
    "cells, words",
    [
        (["2020-01-01", ""], "1 cells are empty"),
        (["2020-01-01", "NaT"], "1 cells are empty"),
        (["Jan 3", "x"], "neither numbers"),
        (["20200401", "2020-05-31"], "'20200401' is not such a date"),
        (["2020-05-31", "today"], "'today' is not such a date"),
        (["2020-05-31 10:00+02:00", "2020-05-31 09:00"], "some times have a time zone"),
        (["2020-05-31T10:00Z", "2020-06-01"], "some times have a time zone"),
    ],
)
def test_times_that_are_none_are_refused(cells, words):
    with pytest.raises(ValueError, match=words):
        in_time("day", cells)


def test_time_zones_and_dates_of_python_are_in_time():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        late, early = in_time("at", ["2020-05-31T10:00:00Z", "2020-05-31 11:00:00+02:00"])
    assert late - early == 3600e6
    assert (np.diff(in_time("day", [date(2020, 4, 1), "2020-04-02", "2020-05"])) > 0).all()


def test_clients_without_training_samples_are_scored_on_their_own_last_window(table):
    source = stays(table)
    source.setup()
    train = source._splits["train"]
    source._splits["train"] = replace(train, indices=[train.indices[0], train.indices[1][:0]])
    data = DriftingDataModule(source, by="day", windows=2)
    data.setup()
    assert data.num_samples("1") == 0 and 0 < data.num_samples("1", "test") < source.num_samples("1", "test")


def test_a_copy_of_a_round_leaves_the_data_alone():
    data = drifting(3)
    before = copy.copy(data.__dict__)
    data.at_round(1).client_dataloader("0", "train")
    assert data.__dict__ == before


@pytest.mark.parametrize("attack", ["leakage", "likelihood_ratio", "canaries"])
def test_samples_of_later_windows_are_no_members(tmp_path, attack):
    from fedlightning import leakage

    data = drifting()
    trainer, _ = fit(data, tmp_path)
    with pytest.raises(ValueError, match="change from round to round"):
        getattr(leakage, attack)(trainer, data)


class Normed(Toy):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(6), *self.net)


def test_a_window_whose_last_batch_is_one_sample_is_told():
    data = drifting(windows=2, sizes=(34, 32))
    data.batch_size = data.source.batch_size = 8
    with pytest.warns(UserWarning, match=r"client '0' has 17 training samples in batches of 8"):
        fit(data, module=Normed(), sanity_check=True)


def test_newcomers_are_placed_by_the_samples_of_the_round(monkeypatch):
    counts = []
    data = drifting(windows=2)
    trainer, _ = fit(data, callbacks=[FeSEM(num_clusters=2)], held_out=["2"])
    placed = Onboarding._placed
    monkeypatch.setattr(
        Onboarding,
        "_placed",
        lambda self, *args: (counts.append(dict(self.server.num_samples)), placed(self, *args))[1],
    )
    trainer.onboard(verbose=False)
    (found,) = counts
    assert found == {client: data.at_round(trainer.server.round).num_samples(client) for client in data.client_ids}
