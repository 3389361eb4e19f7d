"""A whole federation: determinism, failures, memory, files, and modules that nobody here wrote."""

from __future__ import annotations

import csv
import gc
import json
import re
import warnings
import weakref
from importlib.metadata import version

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils.data import DataLoader

from fedlightning import FederatedCallback, FederatedTrainer
from fedlightning.algorithm import Phase
from fedlightning.callbacks import FLIU, SCAFFOLD, Central, FedAdam, FedPer, FedProx, Local, LocalCheckpoint
from fedlightning.client.blueprint import Blueprint
from fedlightning.contract import Job
from fedlightning.engines.attempts import FederationError
from fedlightning.options import Evaluation
from fedlightning.tensors import module_state
from tests.helpers import (
    STYLES,
    NormNet,
    Toy,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    same,
    spied,
    toy_data,
)
from tests.processes import forked

FILES = ["metrics.csv", "summary.json", "checkpoints/global.ckpt", "checkpoints/clients/0.ckpt"]


def finished(root, data=None, callbacks=None, module=None, **options):
    torch.manual_seed(1)
    callbacks = [SCAFFOLD(), LocalCheckpoint()] if callbacks is None else callbacks
    module = NormNet("sgd", dropout=0.2) if module is None else module
    trainer = federate(module, data or toy_data(), callbacks, root=root, participation=2, **options)
    trainer.test()
    return trainer


# -- determinism -----------------------------------------------------------------------------------------------------


def test_the_same_seed_twice_gives_the_same_numbers_and_files(tmp_path):
    first = finished(tmp_path / "a")
    torch.rand(17)  # nothing hangs on the global generator
    second = finished(tmp_path / "b")
    same(global_state(first), global_state(second))
    assert (first.run.path / "metrics.csv").read_bytes() == (second.run.path / "metrics.csv").read_bytes()
    assert first.results == second.results
    assert first.summary["config_hash"] == second.summary["config_hash"]
    other = finished(tmp_path / "c", seed=1)
    assert differs(global_state(first), global_state(other))
    assert first.summary["config_hash"] != other.summary["config_hash"]


ORDERS = [{"site10": 24, "site9": 40, "site1": 16, "b": 9}]
ORDERS.append(dict(reversed(ORDERS[0].items())))


@pytest.mark.parametrize("callbacks", [[SCAFFOLD(), LocalCheckpoint()], [FedPer(), FLIU()]], ids=lambda c: c[0].key)
def test_another_order_of_the_clients_changes_nothing(tmp_path, callbacks):
    torch.manual_seed(1)
    module = Toy("sgd", dropout=0.2)
    runs = [
        federate(module, toy_data(order), callbacks, root=tmp_path / str(i), participation=3, max_rounds=3)
        for i, order in enumerate(ORDERS)
    ]
    assert runs[0].server.clients == ["b", "site1", "site9", "site10"]
    same(*map(global_state, runs))
    a, b = ((run.run.path / "metrics.csv").read_bytes() for run in runs)
    assert a == b


def test_another_order_of_the_clients_does_not_change_their_union(tmp_path):
    torch.manual_seed(1)
    module = Toy("sgd")
    runs = [federate(module, toy_data(order), [Central()], root=tmp_path / str(i)) for i, order in enumerate(ORDERS)]
    same(*map(global_state, runs))
    assert runs[0].test() == runs[1].test()


def test_rounds_and_clients_draw_different_batches():
    class Batches(Toy):
        seen: list = []

        def training_step(self, batch, batch_idx):
            Batches.seen.append(batch[0].sum().item())
            return super().training_step(batch, batch_idx)

    federate(Batches(), toy_data([24, 24]), max_rounds=2)
    assert len(set(Batches.seen)) == len(Batches.seen) == 12


def test_participants_are_drawn_by_round_and_seed():
    def drawn(seed):
        _trainer, spy = spied(Toy(lr=0.0), toy_data([8] * 5), max_rounds=4, participation=0.4, seed=seed)
        return [tuple(spy.of_round(number)) for number in range(4)]

    first = drawn(0)
    assert first == drawn(0)
    assert first != drawn(1)
    assert len(set(first)) > 1
    assert all(len(clients) == 2 and list(clients) == sorted(clients) for clients in first)


# -- a client is left alone ------------------------------------------------------------------------------------------


def test_evaluation_changes_nothing():
    """Every round evaluated on everything, or never: the same tensors, records and generators."""
    module, options = NormNet("adam", dropout=0.3), {"max_rounds": 3, "participation": 2}
    looked = federate(
        module, toy_data(), [FLIU(), FedProx()], evaluation=Evaluation(every=1, data=["local", "pooled"]), **options
    )
    blind = federate(module, toy_data(), [FLIU(), FedProx()], evaluation=Evaluation(every=0, stages=[]), **options)
    same(global_state(looked), global_state(blind))
    for client in "012":
        a, b = looked.store.get(client), blind.store.get(client)
        assert (a.visits, a.last_round, a.steps) == (b.visits, b.last_round, b.steps)
        same(a.state.get("FLIU", {}).get("theta", {}), b.state.get("FLIU", {}).get("theta", {}))
    before = {client: looked.store.get(client) for client in "012"}
    state = {name: value.clone() for name, value in global_state(looked).items()}
    looked.test()
    looked.validate()
    looked.predict(client="0")
    looked.client("1").module.net[0].weight.data.zero_()
    assert all(looked.store.get(client) is before[client] for client in before)
    same(state, global_state(looked))


@pytest.mark.parametrize("callbacks", [[SCAFFOLD()], [FLIU()], [FedPer()], [Local()]], ids=lambda c: c[0].key)
def test_an_absent_clients_record_does_not_change(callbacks):
    _trainer, spy = spied(NormNet("sgd"), toy_data(), callbacks, max_rounds=4, participation=1, evaluation=1)
    absent = 0
    for number in range(1, 4):
        (present,) = {message.client for message in spy.messages if message.round == number and message.work is None}
        for client in {"0", "1", "2"} - {present}:
            before, after = spy.records[number - 1][client], spy.records[number][client]
            assert after is before or after.visits == 0
            absent += after.visits > 0
    assert absent


# -- failures --------------------------------------------------------------------------------------------------------


class Breaks(Toy):
    """Client ``1``'s inputs are recognised by their number."""

    how = "nan"

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) != 7:
            return loss
        if self.how == "raise":
            raise RuntimeError("this site has a problem")
        return loss * float("nan") if self.how == "nan" else None


@pytest.mark.parametrize(
    ("how", "explanation"),
    [
        ("nan", "client '1' failed: FloatingPointError: 'net.0.weight' holds NaN.*Lower the learning rate"),
        ("raise", "client '1' failed: RuntimeError: this site has a problem"),
        ("skip", "client '1' took no real step, so its weight is 0"),
        ("empty", "client '1' has no training samples"),
    ],
)
def test_a_client_that_cannot_contribute(how, explanation, tmp_path):
    """It has weight zero and an explanation, its record stays, the others go on, and so does the file of scores."""
    module, data = Breaks(), toy_data([24, 0 if how == "empty" else 7, 16])
    module.how = how
    type(module).how = how
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, spy = spied(module, data, [SCAFFOLD(), FLIU()], root=tmp_path, max_rounds=2)
    told = [str(w.message) for w in caught if re.search(f"Round [12]: {explanation}", str(w.message))]
    assert len(told) == 2, [str(w.message) for w in caught]
    if how != "skip":  # it did train, and may keep a scaler's state
        assert trainer.store.get("1").visits == 0
        assert trainer.store.get("1").state == {}
    without = toy_data({"0": 24, "2": 16})
    expected = federate(module, without, [FLIU(gamma=0.25), SCAFFOLD()], max_rounds=1)
    same(spy.rounds[0], global_state(expected))
    assert how == "skip" or not [row for row in trainer.rows if row.client == "1" and row.stage == "L2"]
    assert all(torch.isfinite(value).all() for value in global_state(trainer).values())
    counted = [row["per_client"] for row in trainer.results if row["stage"] == "L2"]
    assert counted and all(set(found) - {"1"} == {"0", "2"} for found in counted)


def test_a_failing_visit_leaves_the_record_as_it_was():
    """All or nothing: round 1 works, in round 2 the client fails after training, in the callback that sends."""

    class Fails(FederatedCallback):
        def on_send(self, client, update):
            client.state["SCAFFOLD"]["c"] = {}
            client.state[self.key] = {"half": 1}
            client.record.lightning.clear()
            if client.round == 1 and client.id == "1":
                raise OSError("disk full")

    with pytest.warns(UserWarning, match="Round 2: client '1' failed: OSError: disk full"):
        _trainer, spy = spied(
            NormNet("sgd"), toy_data(), [SCAFFOLD(), FedPer(), Fails()], max_rounds=2, optimizer_state="keep"
        )
    assert spy.records[1]["1"] is spy.records[0]["1"]
    assert spy.records[1]["0"].visits == 2


def test_if_nobody_can_contribute_it_ends_in_a_sentence(tmp_path):
    Breaks.how = "nan"
    trainer = make_trainer(tmp_path)
    with pytest.raises(
        FederationError, match=r"^FloatingPointError: .*NaN.* All 2 clients failed with this error in round 1: no"
    ):
        trainer.fit(Breaks(), datamodule=toy_data([7, 7]))
    assert isinstance(trainer.server.model, dict)
    Breaks.how = "raise"
    with pytest.raises(FederationError) as error:
        federate(Breaks(), toy_data([7]))
    assert isinstance(error.value.__cause__, RuntimeError)


def test_a_plan_of_single_visits_goes_on_without_the_client_that_fails():
    class OneByOne(FederatedCallback):
        def plan_round(self, server):
            for client in server.participants():
                yield [Job(client)]

        def on_send(self, client, update):
            if client.id == "0":
                raise OSError("disk full")

    with pytest.warns(UserWarning, match="client '0' failed: OSError: disk full"):
        trainer = federate(Toy(), toy_data(), [OneByOne()], max_rounds=1)
    assert [trainer.store.get(client).visits for client in "012"] == [0, 1, 1]


def test_no_samples_at_all():
    with pytest.raises(ValueError, match="None of the 2 clients has a training sample"):
        federate(Toy(), toy_data([0, 0]))


def test_one_sample_is_enough_without_batch_norm_and_explained_with():
    trainer = federate(Toy(), toy_data([1, 24]), max_rounds=1)
    assert trainer.store.get("0").steps == 1
    with pytest.warns(UserWarning, match="client '0' failed: ValueError: Expected more than 1 value per channel"):
        trainer = federate(NormNet(), toy_data([1, 24]), max_rounds=1)
    assert trainer.store.get("0").visits == 0


@pytest.mark.parametrize(
    ("options", "used"),
    [({}, 20), ({"limit_train_batches": 2}, 16), ({"limit_train_batches": 0.5}, 8)],
)
def test_num_samples_are_those_really_used(options, used):
    _, spy = spied(Toy(), toy_data([20, 16]), max_rounds=1, **options)
    assert spy.of_round(0)["0"].num_samples == used
    _, spy = spied(Toy(), toy_data([20, 8], drop_last=True), max_rounds=1)
    assert spy.of_round(0)["0"].num_samples == 16


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["reset", "keep"])
def test_a_round_holds_a_constant_number_of_models(monkeypatch, state, tmp_path):
    """Modules and updates alive at once, with Python's garbage collector switched off: 4 clients or 16."""
    modules, updates, held = weakref.WeakSet(), [], []
    build = Blueprint.build

    def noted(self, owner, architecture=None):
        modules.add(module := build(self, owner, architecture))
        return module

    class Count(FederatedCallback):
        def on_update(self, server, update):
            updates.append(weakref.ref(next(iter(update.state.values()))))
            held.append((len(modules), sum(ref() is not None for ref in updates)))

    monkeypatch.setattr(Blueprint, "build", noted)
    peaks = []
    gc.collect()
    gc.disable()
    try:
        for clients in (4, 16):
            updates.clear()
            held.clear()
            modules.clear()
            data = toy_data([8] * clients)
            federate(Toy("onecycle"), data, [Count(), FedProx()], root=tmp_path, max_rounds=2, optimizer_state=state)
            peaks.append(tuple(map(max, zip(*held, strict=True))))
    finally:
        gc.enable()
    assert peaks[0] == peaks[1]
    assert peaks[1][0] <= 4
    assert peaks[1][1] <= 3


# -- modules that nobody here wrote ------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [FedProx(), SCAFFOLD(option=1), FedAdam(), FLIU()], ids=lambda c: c.key)
@pytest.mark.parametrize("kind", [BoringModel, DemoModel])
def test_lightnings_own_demo_modules(kind, callback, tmp_path):
    module = kind()
    loaders = [
        {client: DataLoader(RandomDataset(32, 16 + 8 * i), batch_size=8) for i, client in enumerate("ab")}
        for _ in range(3)
    ]
    trainer = make_trainer(tmp_path, [callback], max_rounds=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*option=1.*")
        trainer.fit(module, train_dataloaders=loaders[0], val_dataloaders=loaders[1], test_dataloaders=loaders[2])
    assert differs(global_state(trainer), module_state(module))
    trainer.test()
    assert {row["split"] for row in trainer.results} >= ({"test", "val"} if kind is BoringModel else set())
    opened = kind.load_from_checkpoint(trainer.run.path / "checkpoints" / "global.ckpt")
    same(module_state(opened), global_state(trainer))


def test_no_validation_inside_training_unless_asked():
    """BoringModel brings loaders of its own; they are not the client's data."""

    class Watched(BoringModel):
        validated = 0

        def validation_step(self, batch, batch_idx):
            Watched.validated += self.trainer.state.fn == "fit"
            return super().validation_step(batch, batch_idx)

    loaders = {"a": DataLoader(RandomDataset(32, 16), batch_size=8)}
    make_trainer(None, max_rounds=1).fit(Watched(), train_dataloaders=loaders)
    make_trainer(None, max_rounds=1, check_val_every_n_epoch=1).fit(Watched(), train_dataloaders=loaders)
    assert Watched.validated == 0
    trainer = make_trainer(None, max_rounds=1, check_val_every_n_epoch=1)
    trainer.fit(Watched(), train_dataloaders=loaders, val_dataloaders=loaders)
    assert Watched.validated == 2


@pytest.mark.parametrize(
    "callbacks", [[FedProx()], [SCAFFOLD()], [FedAdam()], [FLIU()], [FedPer()]], ids=lambda c: c[0].key
)
def test_the_style_of_a_module_does_not_matter(callbacks):
    """Three ways to write one classifier give one result."""
    results = []
    for style in STYLES:
        torch.manual_seed(3)
        trainer = federate(style("sgd"), toy_data(), callbacks, max_rounds=2)
        results.append(list(global_state(trainer).values()))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


# -- what a user sees ------------------------------------------------------------------------------------------------


def test_files_of_a_run(tmp_path):
    trainer = finished(tmp_path, name="mine")
    run = trainer.run.path
    assert run == tmp_path / "mine" / "version_0"
    for name in [*FILES, "checkpoints/last/manifest.json", *(f"checkpoints/clients/{c}.ckpt" for c in "12")]:
        assert (run / name).is_file(), name
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) >= {"round", "stage", "client", "split", "metric", "value"}
    assert {row["round"] for row in rows} == {"1", "2"}
    assert len({tuple(row[k] for k in row if k != "value") for row in rows}) == len(rows)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == 2 and summary["num_clients"] == 3
    assert summary["callbacks"] == {c.key: c.hyperparameters() for c in trainer.callbacks}
    assert summary["bytes_up"] == trainer.server.costs.bytes_up > 0
    assert {"bytes_down", "seconds", "peak_memory_mb", "versions", "config_hash"} <= set(summary)
    assert summary["versions"]["torch"] == version("torch")
    assert [entry["round"] for entry in summary["per_round"]] == [1, 2]
    for name in ("bytes_up", "bytes_down"):
        assert sum(entry[name] for entry in summary["per_round"]) == summary[name]
    assert sum(entry["steps"] for entry in summary["per_round"]) == summary["local_steps_total"]
    assert summary["results"] == json.loads(json.dumps(trainer.results))
    for row in summary["results"]:
        assert set(row) == {
            "model", "stage", "checkpoint", "data", "split", "metric", "mean", "weighted_mean", "std", "variance",
            "median", "worst", "tenth_percentile", "clients", "per_client",
        }  # fmt: skip
    again = finished(tmp_path, name="mine")
    assert again.run.path.name == "version_1"


def test_nothing_is_written_by_a_debug_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = FederatedTrainer(fast_dev_run=True, max_rounds=9, enable_progress_bar=False, callbacks=[FLIU()])
    trainer.fit(NormNet(), datamodule=toy_data())
    assert trainer.rounds_done == 1
    assert trainer.store.get("1").steps == 1
    assert list(tmp_path.iterdir()) == []
    assert trainer.results


def test_scores_go_to_loggers(tmp_path):
    logger = CSVLogger(tmp_path / "logs")
    trainer = make_trainer(tmp_path, logger=logger, max_rounds=2)
    trainer.fit(Toy(), datamodule=toy_data())
    with open(tmp_path / "logs" / "lightning_logs" / "version_0" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    row = next(r for r in trainer.results if (r["stage"], r["split"], r["metric"]) == ("G", "val", "val_loss"))
    assert float(rows[-1]["val/G/local/val_loss"]) == pytest.approx(row["mean"])


def test_states_can_be_saved_seldom_or_never(tmp_path):
    trainer = federate(Toy(), toy_data(), root=tmp_path, max_rounds=3, save_state=0)
    assert not (trainer.run.path / "checkpoints" / "last").exists()


def test_the_time_limit_stops_at_a_round(tmp_path):
    trainer = federate(Toy(), toy_data(), root=tmp_path, max_rounds=50, max_time={"seconds": 0})
    assert trainer.rounds_done == 1
    assert trainer.summary["rounds"] == 1
    assert (trainer.run.path / "checkpoints" / "global.ckpt").exists()


def test_a_client_as_a_user_sees_it():
    trainer = federate(Toy("adam"), toy_data(), [FedPer()], max_rounds=2)
    view = trainer.client(1)
    assert (view.id, view.num_samples) == ("1", 40)
    assert isinstance(view.module, Toy)
    assert torch.equal(view.module.net[3].weight, trainer.store.get("1").personal["net.3.weight"])
    predicted = torch.cat(trainer.predict(client="1"))
    x, _ = trainer.federation.engine.runner.data.tensors["1"]["test"]
    assert torch.equal(predicted, view.module.eval()(x).argmax(-1))
    with pytest.raises(ValueError, match=r"no client '7'.*'0', '1', '2'"):
        trainer.module("7")
    with pytest.raises(ValueError, match="no global model"):
        trainer.predict()


def test_the_global_model_predicts_on_the_union():
    trainer = federate(Toy("adam"), toy_data(), max_rounds=1)
    assert len(torch.cat(trainer.predict())) == 36


class Writes(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((list(batch_indices), prediction))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append(predictions)


@pytest.mark.parametrize("given", [True, False])
def test_a_writer_of_predictions_is_called(given):
    """As in Lightning; a ModelCheckpoint beside it has no place in a prediction, and would be refused there."""
    writer = Writes()
    trainer = federate(Toy(), toy_data(), [writer, ModelCheckpoint()], max_rounds=1)
    assert not writer.batches
    loader = trainer.federation.engine.runner.data.client_dataloader("1", "test")
    predicted = trainer.predict(loader if given else None, client="1")
    assert torch.equal(torch.cat([one for _, one in writer.batches]), torch.cat(predicted))
    assert [index for indices, _ in writer.batches for index in indices] == list(range(len(torch.cat(predicted))))
    assert torch.equal(torch.cat(writer.epochs[0]), torch.cat(predicted))


def test_early_stopping_is_each_clients_own():
    """Shared, it would compare one client's loss with another's; a stopped epoch ends the visit, not the federation."""
    stop = EarlyStopping("train_loss", mode="min", patience=0, min_delta=10.0, check_on_train_epoch_end=True)
    with pytest.warns(
        UserWarning, match=r"'train_loss' goes on from visit to visit: .* each later visit ends after one epoch"
    ):
        _trainer, spy = spied(Toy(), toy_data([8, 8]), [stop], max_rounds=2, local_epochs=5)
    assert [update.steps for update in spy.updates] == [2, 2, 1, 1]
    assert stop.wait_count == 0


@pytest.mark.parametrize("optimizer", ["sgd", "steplr", "onecycle", "sequential"])
@pytest.mark.parametrize("state", ["reset", "keep"])
def test_learning_rate_decay_survives_new_optimizers(optimizer, state):
    class Rates(Toy):
        seen: list = []

        def configure_optimizers(self):
            if self.optimizer_name != "sequential":
                return super().configure_optimizers()
            sgd = torch.optim.SGD(self.parameters(), self.lr)
            parts = [torch.optim.lr_scheduler.LambdaLR(sgd, lambda step, k=k: 1 / (step + k)) for k in (2, 1)]
            schedule = torch.optim.lr_scheduler.SequentialLR(sgd, parts, milestones=[1])
            return [sgd], [{"scheduler": schedule, "interval": "step"}]

        def training_step(self, batch, batch_idx):
            Rates.seen.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    def rates(decay):
        Rates.seen = []
        options = {"max_rounds": 3, "local_epochs": 2, "optimizer_state": state}
        federate(Rates(optimizer), toy_data([16, 16]), lr_decay=decay, **options)
        return torch.tensor(Rates.seen).reshape(3, 2, 4)

    expected = rates(1.0) * torch.tensor([1.0, 0.5, 0.25])[:, None, None]
    torch.testing.assert_close(rates(0.5), expected)


class Sometimes(FederatedCallback):
    """A second fit in the first round and the third."""

    def local_phases(self, client):
        if client.round != 1:
            yield Phase("extra", federated=False)
        yield Phase()


def test_learning_rates_decay_by_the_rounds_since_a_phase_had_its_turn():
    class Rates(Toy):
        seen: list = []

        def training_step(self, batch, batch_idx):
            self.seen.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    federate(Rates(lr=0.4), toy_data([8]), [Sometimes()], max_rounds=3, optimizer_state="keep", lr_decay=0.5)
    assert Rates.seen == pytest.approx([0.4, 0.4, 0.2, 0.1, 0.1])


def test_steps_and_bytes_are_counted():
    trainer, spy = spied(Toy(), toy_data([24, 40, 16]), max_rounds=2, local_epochs=2)
    size = sum(4 * value.numel() for value in global_state(trainer).values())
    assert trainer.server.costs.bytes_up == trainer.server.costs.bytes_down == 6 * size
    assert trainer.server.costs.steps == 2 * 2 * (3 + 5 + 2)
    update = spy.of_round(1)["1"]
    assert (update.steps, update.skipped) == (10, 0)
    assert update.lr_sum == pytest.approx(10 * 0.1)


def test_manual_optimization_works():
    class Manual(Toy):
        def __init__(self):
            super().__init__("sgd")
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

    torch.manual_seed(0)
    manual = Manual()
    automatic = Toy("sgd")
    automatic.load_state_dict(manual.state_dict())
    runs = [
        federate(module, toy_data(), [FedProx(0.5)], max_rounds=2, local_epochs=2) for module in (manual, automatic)
    ]
    close(*map(global_state, runs), atol=1e-7)


def test_lightnings_arguments_reach_the_clients(tmp_path, capfd):
    federate(Toy(), toy_data([16]), root=tmp_path, max_rounds=1, profiler="simple", log_every_n_steps=1, num_nodes=1)
    assert capfd.readouterr().out == ""


class FailsInOneClient(Toy):
    """Fails in the middle of a fit where batches are small."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) < 4:
            raise RuntimeError("a small batch")
        return super().training_step(batch, batch_idx)


class NotesEnds(PassThroughProfiler):
    """Notes which of the profilers that began have been told to end; not by the garbage collector, whenever that comes."""

    began, ended = set(), set()

    def start(self, action_name):
        self.began.add(id(self))

    def teardown(self, stage):
        self.ended.add(id(self))

    def __del__(self):
        pass


def test_a_profiler_ends_with_its_fit_however_that_ends():
    """Two of torch's that run at once end the process."""
    profiler = NotesEnds()
    data = toy_data([16, 3, 16])
    federate(FailsInOneClient(), data, max_rounds=2, profiler=profiler, failures="skip")
    assert len(profiler.began) > 1 and profiler.began <= profiler.ended


def test_torchs_profiler_measures_every_visit(tmp_path):
    done = forked(lambda: federate(Toy(), toy_data(), root=tmp_path, max_rounds=2, profiler="pytorch") and 0, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_trainer_can_fit_again(tmp_path):
    trainer = make_trainer(tmp_path, max_rounds=1)
    trainer.fit(Toy(), datamodule=toy_data())
    first = len(trainer.rows)
    trainer.fit(Toy(), datamodule=toy_data())
    assert len(trainer.rows) == first
    assert trainer.run.path.name == "version_1"
