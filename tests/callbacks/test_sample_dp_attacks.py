"""SampleDP against what would leave without noise: other steps, other memory, other samplers, mixed records, resumed runs."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler, default_collate

pytest.importorskip("opacus", reason="SampleDP counts with Opacus: pip install opacus cryptography")

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from fedlightning.algorithm import Change, Facts, FederatedCallback
from fedlightning.callbacks import ClientDP, FedAvg, FedLP, sample_dp
from fedlightning.engines.attempts import FederationError
from fedlightning.tensors import equal
from tests.callbacks.test_sample_dp import SIZES, Plain, dp, module, plain_trainer, records
from tests.helpers import Toy, federate, global_state, make_trainer, toy_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:SampleDP"),
    pytest.mark.filterwarnings("ignore:Optimal order"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


def loader(**options):
    return DataLoader(records(), batch_size=5, **options)


class Watches(Plain):
    """Keeps a mean of its inputs in a buffer."""

    def __init__(self):
        super().__init__()
        self.part = nn.Module()
        self.part.register_buffer("seen", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        self.part.seen = 0.9 * self.part.seen + 0.1 * batch[0].detach().mean(0)
        return super().training_step(batch, batch_idx)


class WatchesLater(Watches):
    def training_step(self, batch, batch_idx):
        return Plain.training_step(self, batch, batch_idx)

    def on_train_epoch_end(self):
        self.part.seen = self.layer.weight.grad.mean(0) + 1.0


class Renormed(Plain):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(3, 4, max_norm=0.5)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0] + self.rows(batch[1])), batch[1])


class PastHooks(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.optimizer.step()


class TwoGradients(Plain):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class Plateau(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}


class Thaws(Plain):
    """Opacus has no hooks on what is frozen when a fit begins."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 3).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.last(self.layer(batch[0])), batch[1])

    def on_train_epoch_start(self):
        self.last.requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Watches(), "changes the buffer 'part.seen'"),
        (WatchesLater(), "changes the buffer 'part.seen'"),
        (Renormed(), "'rows' has max_norm"),
        (PastHooks(), "goes past Lightning's hooks"),
        (TwoGradients(), "LBFGS asked for a second gradient of one batch"),
        (Plateau(), "goes by 'train_loss'"),
        (Thaws(), "'last.weight' has a part that is of no single record"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_learnt_past_the_noise_is_refused(net, reason):
    with pytest.raises(ValueError, match=reason):
        plain_trainer(dp(), max_epochs=2).fit(net, loader())


def test_an_end_of_training_by_its_own_numbers_is_refused():
    trainer = plain_trainer(dp(), max_epochs=2)
    trainer.callbacks.append(EarlyStopping("train_loss"))
    with pytest.raises(ValueError, match="goes by 'train_loss'"):
        trainer.fit(Plateau(), loader())


@pytest.mark.parametrize(
    "sampler",
    [SubsetRandomSampler(range(10)), WeightedRandomSampler([1.0] * 20, 40)],
    ids=lambda one: type(one).__name__,
)
def test_samplers_that_draw_others_are_refused(sampler):
    with pytest.raises(ValueError, match=rf"cannot from DataLoader \({type(sampler).__name__}"):
        plain_trainer(dp()).fit(Plain(), loader(sampler=sampler))


def mixed(rows):
    x, y = default_collate(rows)
    return 0.5 * (x + x.roll(1, 0)), y


def test_a_collate_fn_that_mixes_records_is_refused():
    with pytest.raises(ValueError, match="collate_fn must not mix them"):
        plain_trainer(dp()).fit(Plain(), loader(collate_fn=mixed))
    data = toy_data(SIZES)
    data.setup("fit")
    plain = data.client_dataloader

    def mixing(client, split):
        made = plain(client, split)
        made.collate_fn = mixed
        return made

    data.client_dataloader = mixing
    with pytest.raises(FederationError, match="collate_fn must not mix them"):
        federate(module(), data, [FedAvg(), dp()], max_rounds=1)


def test_a_parameter_of_no_dimension():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, values):
            return values * self.scale

    class Scaled(Plain):
        def __init__(self):
            super().__init__()
            self.scaled = Scale()

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.scaled(self.layer(batch[0])), batch[1])

    callback = dp()
    plain_trainer(callback).fit(Scaled(), loader())
    assert callback.state_dict()["history"] == [[1.0, 0.25, 4]]


@pytest.mark.parametrize("precision", ["bf16-mixed"])
def test_no_record_is_longer_than_the_bound_in_16_bits(precision, monkeypatch):
    from fedlightning.callbacks.shared import record_gradients

    lengths = []
    monkeypatch.setattr(
        record_gradients.RecordGradients,
        "_cover",
        lambda self, chosen, sums: lengths.append(
            (float(torch.cat([one.double().flatten() for one in sums]).norm()), self.size * self.clip)
        ),
    )
    plain_trainer(dp(clip=0.01), precision=precision, max_epochs=3).fit(Plain(), loader())
    assert len(lengths) == 12 and all(length <= most for length, most in lengths)
    single = [length for length, most in lengths if most == 0.01]
    assert all(0.0099 < length <= 0.01 for length in single)


@pytest.mark.parametrize("hook", ["setup", "on_train_start", "on_before_zero_grad", "on_fit_end", "teardown"])
@pytest.mark.parametrize("base", [Toy, FederatedCallback], ids=["module", "callback"])
def test_entries_that_move_beside_the_steps_of_a_fit_are_refused(hook, base):
    """Right before its first step, in the middle of one, and when the last hook that SampleDP itself has is over."""

    def write(*arguments, **options):
        module = next(one for one in arguments if isinstance(one, Toy))
        module.net[0].weight.data.add_(1.0)

    writing = type("Writing", (base,), {hook: write})()
    net, beside = (writing, []) if base is Toy else (Toy(), [writing])
    with pytest.raises(FederationError, match=r"'net\.0\.weight' has moved without a step of the optimizer"):
        federate(net, toy_data(SIZES), [FedAvg(), dp(), *beside], max_rounds=1)


def test_samples_are_withheld_before_training_starts():
    class Reads(FederatedCallback):
        def on_receive(self, client, message):
            rows, _ = next(iter(client.loader("train")))
            message.state["net.0.weight"] = message.state["net.0.weight"] + rows.mean()

    with pytest.raises(FederationError, match="gives its samples to the steps of training only, which SampleDP covers"):
        federate(Toy(), toy_data(SIZES), [FedAvg(), dp(), Reads()], max_rounds=1)


def test_scores_and_gaps_that_a_callback_adds_do_not_leave(tmp_path):
    class Tells(FederatedCallback):
        def on_send(self, client, update):
            update.gaps.append(("L2", "local", "val", "a mean of 12345"))

    with pytest.warns(UserWarning, match="what Tells makes of an update in on_send is set to nothing"):
        trainer = federate(Toy(), toy_data(SIZES), [FedAvg(), dp(), Tells()], tmp_path, max_rounds=1)
    assert "12345" not in (trainer.run.path / "summary.json").read_text()


@pytest.mark.parametrize("by", ["ClientDP", "SampleDP"])
def test_what_was_sent_stays_what_the_guarantee_goes_by(by):
    """A client shares its memory with the server where it trains in one process."""

    class Writes(FederatedCallback):
        def on_send(self, client, update):
            for value in client.received.values():
                value.add_(9.0)

    net = Toy()
    for one in net.net[0].parameters():
        one.requires_grad_(False)
    start = net.net[0].weight.detach().clone()
    chosen = dp() if by == "SampleDP" else ClientDP(delta=1e-3, noise_multiplier=1e-9, clip=0.1, noise_seed=1)
    trainer = federate(net, toy_data(SIZES), [FedAvg(weighting="uniform"), chosen, Writes()], max_rounds=1)
    after = global_state(trainer)
    assert torch.equal(after["net.0.weight"], start)
    assert float(after["net.3.weight"].abs().max()) < 8.0


# -- runs that go on ---------------------------------------------------------------------------------------------------
def test_a_plain_checkpoint_goes_on_in_the_middle_and_spends_once(tmp_path):
    def trainer(callback, **options):
        return plain_trainer(callback, max_epochs=2, **options)

    class Stops(Plain):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 6:
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    given = {"noise_multiplier": None, "epsilon": 6.0, "noise_seed": None}
    trainer(dp(**given)).fit(Stops(), loader())
    again = dp(**given)
    trainer(again).fit(Plain(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    ((noise, rate, steps),) = again.state_dict()["history"]
    assert steps == 8 and again.epsilon_of([(noise, rate, steps)]) <= 6.0


def test_a_plain_checkpoint_without_noise_is_refused(tmp_path):
    trainer = plain_trainer(EarlyStopping("train_loss"))
    trainer.fit(Plateau(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="goes on from 4 steps, of which it has counted 0"):
        plain_trainer(dp(), max_epochs=2).fit(Plain(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)


@pytest.mark.parametrize("before", [[FedAvg()], [dp()]], ids=["without", "known"])
def test_rounds_without_noise_or_with_known_noise_are_not_called_private(tmp_path, before):
    make_trainer(tmp_path, before, max_rounds=1, name="a").fit(module(), datamodule=toy_data(SIZES))
    for seed in (None, 5):
        again = make_trainer(tmp_path, [FedAvg(), dp(noise_seed=seed)], max_rounds=2, name="a")
        with (
            pytest.raises(ValueError, match="cannot go on with another configuration")
            if seed is None
            else nullcontext()
        ):
            again.fit(module(), datamodule=toy_data(SIZES), resume="last", allow_config_change=True)
    assert json.loads((again.run.path / "privacy.json").read_text())["private"] is False


def test_a_callback_that_inherits_a_look_at_batches_is_refused():
    class Looks(FedAvg):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seen = batch

    class Inherits(Looks):
        pass

    with pytest.raises(ValueError, match="sees batches or gradients of training"):
        federate(module(Toy), toy_data(SIZES), [Inherits(), dp()], max_rounds=1)


class Remembers(Toy):
    """Leaves on itself what it has seen in a step, as many modules do."""

    def training_step(self, batch, batch_idx):
        self.seen = batch[0].detach().mean()
        return super().training_step(batch, batch_idx)


class Sends(FederatedCallback):
    """Adds what it has seen of records to an update, in place or not, and keeps the update for later."""

    def __init__(self, how, rank=5):
        self.how, self.rank = how, rank

    def on_send(self, client, update):
        entry = update.state["net.0.weight"]
        if self.how == "in place":
            entry.add_(client.module.seen)
        elif self.how == "extra":
            update.extras["stowaway"] = {"seen": client.module.seen}
        else:
            update.state["net.0.weight"] = entry + client.module.seen


class Declares(Sends):
    facts = Facts(changes={Change.ALTERS})


@pytest.mark.parametrize("rank", [-2000, 5, 2000])
@pytest.mark.parametrize("how", ["in place", "another", "extra"])
def test_what_a_callback_makes_of_an_update_without_saying_so_is_set_to_nothing(how, rank):
    alone = federate(module(Remembers), toy_data(SIZES), [FedAvg(), dp()], max_rounds=1)
    with pytest.warns(UserWarning, match="what Sends makes of an update in on_send is set to nothing"):
        beside = federate(module(Remembers), toy_data(SIZES), [FedAvg(), dp(), Sends(how, rank)], max_rounds=1)
    assert equal(global_state(alone), global_state(beside))


def test_what_it_declares_leaves():
    alone = federate(module(Remembers), toy_data(SIZES), [FedAvg(), dp()], max_rounds=1)
    for other in (Declares("another"), FedLP(q=0.5)):
        beside = federate(
            module(Remembers),
            toy_data(SIZES),
            [*([] if isinstance(other, FedLP) else [FedAvg()]), dp(), other],
            max_rounds=1,
        )
        assert not equal(global_state(alone), global_state(beside))


@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward", "on_before_optimizer_step"])
def test_a_callback_that_sees_gradients_or_losses_is_refused(hook):
    looks = type("Looks", (FederatedCallback,), {hook: lambda self, *values: None})
    with pytest.raises(ValueError, match=rf"Looks sees batches or gradients of training \({hook}\)"):
        federate(module(Toy), toy_data(SIZES), [looks(), dp()], max_rounds=1)


class Writes(Plain):
    """Writes what a batch has into a parameter, between steps or after the last one."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.layer.bias.add_(batch[0].mean())


class WritesAtLast(FederatedCallback):
    def on_train_end(self, trainer, pl_module):
        with torch.no_grad():
            pl_module.net[0].bias.add_(pl_module.seen)


def test_nothing_but_the_optimizer_moves_what_is_trained():
    with pytest.raises(ValueError, match=r"'layer\.bias' has moved without a step of the optimizer"):
        plain_trainer(dp(), max_epochs=1).fit(module(Writes), loader())
    with pytest.raises(FederationError, match=r"'net\.0\.bias' has moved without a step of the optimizer"):
        federate(module(Remembers), toy_data(SIZES), [FedAvg(), dp(), WritesAtLast()], max_rounds=1)


class MixesLater(Plain):
    """Mixes records from the second epoch on."""

    def training_step(self, batch, batch_idx):
        x = batch[0] if self.current_epoch == 0 else 0.5 * batch[0] + 0.5 * batch[0].flip(0)
        return F.cross_entropy(self.layer(x), batch[1])


class MixesMany(Plain):
    """Mixes records where there are more than four."""

    def training_step(self, batch, batch_idx):
        x = batch[0] if len(batch[0]) <= 4 else batch[0] - batch[0].mean(0)
        return F.cross_entropy(self.layer(x), batch[1])


class FollowsEpochs(Plain):
    """Weighs its loss by the epoch, which mixes nothing."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0]), batch[1]) / (1.0 + self.current_epoch)


@pytest.mark.parametrize("kind", [MixesLater, MixesMany])
def test_a_batch_that_is_trained_on_is_tried_in_each_epoch(kind):
    with pytest.raises(ValueError, match="another gradient in a batch than alone"):
        plain_trainer(dp(), max_epochs=3).fit(module(kind), DataLoader(records(40), batch_size=20))


class MeansOverTokens(Toy):
    """A mean over tokens: a long record takes weight from the others of its batch."""

    def training_step(self, batch, batch_idx):
        weights = 1.0 + 20.0 * (batch[0][:, 0] > 50.0)
        return (weights * F.cross_entropy(self(batch[0]), batch[1], reduction="none")).sum() / weights.sum()


def test_batches_are_tried_where_a_visit_is_one_epoch(monkeypatch):
    """One record of one client mixes: neither the first batch nor the first records have it."""
    monkeypatch.setattr(sample_dp, "SOME_VISITS", 1.0)
    data = toy_data({"0": 16, "1": 32})
    data.tensors["1"]["train"][0][20, 0] = 99.0
    with pytest.warns(UserWarning, match="client '1' failed.* another gradient in a batch than alone"):
        federate(module(MeansOverTokens), data, [FedAvg(), dp(clip=1e-6)], max_rounds=8)


def test_a_loss_that_follows_epochs_goes_on():
    plain_trainer(dp(), max_epochs=3).fit(module(FollowsEpochs), DataLoader(records(40), batch_size=20))


class Logs(Plain):
    """Logs a number of training under a name of validation, and one of each by its own."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("val_like", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("late", 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", 1.0)


@pytest.mark.parametrize("monitor", ["val_like", "both_epoch", "both_step", "late"])
@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_nothing_goes_by_a_number_that_training_logs_whatever_it_is_called(kind, monitor, tmp_path):
    trainer = plain_trainer(
        dp(), kind(monitor=monitor), max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=True
    )
    fitted = module(Logs)
    with pytest.raises(ValueError, match=f"goes by '{monitor}', which training logs"):
        trainer.fit(fitted, loader(), loader())
    assert "log" not in vars(fitted)


def test_no_file_is_named_by_a_number_that_training_logs(tmp_path):
    checkpoint = ModelCheckpoint(filename="{epoch}-{both_epoch:.3f}")
    trainer = plain_trainer(dp(), checkpoint, max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True)
    with pytest.raises(ValueError, match="goes by 'both_epoch', which training logs"):
        trainer.fit(module(Logs), loader(), loader())


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_what_validation_logs_may_choose(kind, tmp_path):
    trainer = plain_trainer(
        dp(), kind(monitor="accuracy"), max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=True
    )
    if kind is ModelCheckpoint:
        trainer.checkpoint_callback.filename = "{epoch}-{accuracy:.2f}"
    trainer.fit(module(Logs), loader(), loader())
    assert trainer.current_epoch == 2


# -- what a federation's callbacks and modules could go by -------------------------------------------------------------
class GoesByLosses(FederatedCallback):
    """Ends training, and keeps for the next visit, by what training has logged."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen += [*trainer.callback_metrics, *trainer.logged_metrics]

    def on_send(self, client, update):
        self.seen += [*client.metrics, *update.metrics, *client.logs]


class LogsByItself(Toy):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.logger is not None:  # a trial has none
            self.logger.log_metrics({"loss": float(loss.detach())})
        return loss


def test_what_training_logs_reaches_no_callback_of_a_federation(tmp_path):
    alone, beside = GoesByLosses(), GoesByLosses()
    options = {"max_rounds": 1, "log_clients": True, "logger": True}
    federate(module(LogsByItself), toy_data(SIZES), [FedAvg(), alone], tmp_path / "a", **options)
    federate(module(LogsByItself), toy_data(SIZES), [FedAvg(), dp(), beside], tmp_path / "b", **options)
    assert "train_loss" in alone.seen and not beside.seen


class Weighs(Toy):
    """Weighs its loss by the labels of all of a client's samples."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def setup(self, stage):
        if self.how == "data module":
            self.weigh(self.trainer.datamodule.train_dataloader())

    def on_train_start(self):
        if self.how == "loader":
            self.weigh(self.trainer.train_dataloader)

    def weigh(self, batches):
        counts = sum(torch.bincount(labels, minlength=3) for _, labels in batches)
        self.weight = 1.0 / (1.0 + counts)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("data module", "gives its samples to the steps of training only"), ("loader", "were iterated beside its steps")],
)
def test_weights_of_classes_from_samples_are_refused(how, reason):
    with pytest.raises(FederationError, match=reason):
        federate(Weighs(how), toy_data(SIZES), [FedAvg(), dp()], max_rounds=1)


class Standardises(Plain):
    """Takes a mean of its data into a buffer before the first step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def on_fit_start(self):
        self.mean += 1.0


def test_statistics_that_a_fit_begins_with_are_refused():
    with pytest.raises(ValueError, match="changes the buffer 'mean'"):
        plain_trainer(dp()).fit(module(Standardises), loader())


def test_loaders_that_are_made_anew_in_a_fit_are_refused():
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs=1"):
        plain_trainer(dp(), max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(module(Plain), loader())
