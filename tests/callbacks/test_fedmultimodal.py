"""FedMultimodal: sheet B 4.3."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import SCAFFOLD, FedAdam, FedAvg, FedMultimodal, FedProx, Harmony
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import Toy, close, federate, global_state, mean_of, same, spied, toy_data
from tests.modalities import SIZES, network, of_encoder, senses

CASES = {"FedMultimodal": Case(FedMultimodal(encoders={"x": ["body"]}))}
KEPT = {"FedMultimodal": Kept("FedMultimodal", options={"encoders": {"x": ["net.0"]}})}
SENSORS = {"A+D": 1, "A": 1, "A+D+R": 1}


@pytest.mark.parametrize("options", [{}, {"missing": 0.0, "missing_labels": 0.0, "wrong_labels": 0.0}])
def test_with_every_modality_everywhere_it_is_fedavg(options):
    module = network(norm=True)
    plain = federate(module, senses(), [FedAvg()], max_rounds=2)
    ours = federate(module, senses(**options), [FedMultimodal()], max_rounds=2)
    same(global_state(plain), global_state(ours))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("fusion", ["concat", "attention", "gate"])
def test_an_encoder_is_averaged_over_those_who_have_its_modality(fusion, norm):
    module, data = network(fusion=fusion, norm=norm), senses(sensors=SENSORS)
    trainer, spy = spied(module, data, [FedMultimodal()], max_rounds=1)
    sent, start = spy.of_round(0), module_state(module)
    holders = {"A": "012", "D": "02", "R": "2"}
    for name, clients in holders.items():
        for client, update in sent.items():
            entries = of_encoder(name, update.state)
            assert bool(entries) == (client in clients)
            assert not entries or any(not torch.equal(value, start[key]) for key, value in entries.items())
        weights = {client: float(sent[client].num_samples) for client in clients}
        own = {c: SimpleNamespace(state=of_encoder(name, sent[c].state)) for c in clients}
        found = {k: v for k, v in of_encoder(name, global_state(trainer)).items() if v.is_floating_point()}
        close(mean_of(own, weights), found, atol=1e-7)


def test_without_the_rule_those_without_a_modality_hold_its_encoder_back():
    module, data = network(), senses(sensors=SENSORS)
    trainer, spy = spied(module, data, [FedMultimodal(holders_only=False)], max_rounds=1)
    sent = spy.of_round(0)
    same(of_encoder("R", sent["0"].state), of_encoder("R", module_state(module)))
    plain = federate(module, data, [FedAvg()], max_rounds=1)
    same(global_state(plain), global_state(trainer))


def test_an_encoder_that_nobody_has_stays_and_server_optimizers_do_not_move_it():
    module, data = network(), senses(sensors={"A+D": 3})
    for callbacks in ([FedMultimodal()], [FedAdam(), FedMultimodal()], [FedProx(mu=1.0), FedMultimodal()]):
        found = global_state(federate(module, data, callbacks, max_rounds=2))
        same(of_encoder("R", found), of_encoder("R", module_state(module)))
        assert not torch.equal(found["net.encoders.A.fc1.weight"], module_state(module)["net.encoders.A.fc1.weight"])


def test_momentum_and_decay_do_not_move_an_encoder_either():
    class Heavy(type(network())):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.5)

    module = network()
    module.__class__ = Heavy
    _, spy = spied(module, senses(sensors=SENSORS), [FedMultimodal(holders_only=False)], max_rounds=2)
    same(of_encoder("R", spy.of_round(0)["1"].state), of_encoder("R", module_state(module)))


class Blind(LightningModule):
    """Concatenates inputs, with zeros in place of what is missing, and so trains all encoders on them."""

    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: nn.Linear(size, 4) for name, size in SIZES.items()})
        self.head, self.zeros = nn.Linear(12, 3), zeros

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = {name: values.nan_to_num() if self.zeros else values for name, values in x.items()}
        return F.cross_entropy(self.head(torch.cat([self.encoders[n](x[n]) for n in SIZES], 1)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_modules_that_train_an_encoder_blindly_are_refused():
    with pytest.raises(ValueError, match=r"without 'A' Blind gives 'encoders\.A\.weight' a gradient"):
        federate(Blind(zeros=True), senses(sensors=SENSORS), [FedMultimodal()])
    with pytest.raises(ValueError, match="without 'A' Blind has the loss nan"):
        federate(Blind(zeros=False), senses(sensors=SENSORS), [FedMultimodal()])


def test_the_check_also_sees_what_the_first_client_lacks():
    with pytest.raises(ValueError, match=r"without 'D' Blind gives 'encoders\.D\.weight' a gradient"):
        federate(Blind(zeros=True), senses(sensors={"A": 1, "A+D+R": 2}), [FedMultimodal()])


class Unchecked(FedMultimodal):
    """As if the batch before round 1 had shown nothing."""

    key = "FedMultimodal"

    def check(self, setup):
        pass


def test_a_client_that_trained_an_encoder_blindly_is_left_out():
    data = senses(sensors={"A": 1, "A+D": 1, "A+D+R": 1})
    with pytest.warns(
        UserWarning, match=r"no sample has 'D', but 'encoders\.D\.weight' of its encoder has been trained"
    ):
        trainer, spy = spied(Blind(zeros=True), data, [Unchecked()], max_rounds=1)
    assert [failure["client"] for failure in trainer.server.failures] == ["0", "1"]
    assert set(spy.of_round(0)) == {"2"}


def test_data_and_module_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="Toy has no ModuleDict called 'encoders'"):
        federate(Toy(), toy_data(), [FedMultimodal()])
    with pytest.raises(ValueError, match="has the encoders of A, D, and a batch has A, D, R"):
        federate(network("AD"), senses(), [FedMultimodal()])
    with pytest.raises(ValueError, match="is in the encoders of two modalities"):
        federate(network(), senses(), [FedMultimodal(encoders={"A": ["net.encoders"], "D": ["net.encoders.D"]})])


def accuracy(names, root, sensors=None):
    """Mean test accuracy of the global model on digits of which each modality is a half."""
    from fedlightning.datamodules import DirichletPartitioner, PairedDigitsDataModule
    from fedlightning.models import MLP, Classifier, MultimodalNet

    torch.manual_seed(0)
    split = DirichletPartitioner(4, 1.0)
    data = PairedDigitsDataModule(split, batch_size=16, modalities=names, sensors=sensors)
    net = MultimodalNet({name: MLP(32, [64], 64) for name in names}, 10, fusion="attention")
    options = {"max_rounds": 8, "local_epochs": 2, "evaluation": 0}
    trainer = federate(Classifier(net, 10, lr=0.1), data, [FedMultimodal()], root, **options)
    rows = trainer.test()
    return next(
        row["mean"]
        for row in trainer.results
        if (row["stage"], row["data"], row["split"], row["metric"]) == ("G", "local", "test", "test_accuracy")
    ), rows


@pytest.mark.slow
def test_both_halves_are_better_than_each_alone_and_a_client_without_one_does_no_harm(tmp_path):
    upper, lower, both = (
        accuracy(names, tmp_path / "".join(names))[0] for names in (["upper"], ["lower"], ["upper", "lower"])
    )
    assert 0.6 < upper < 0.9 and 0.6 < lower < 0.9
    assert both > max(upper, lower) + 0.05
    lacking, _ = accuracy(["upper", "lower"], tmp_path / "lacking", {"upper": 1, "upper+lower": 3})
    assert lacking > max(upper, lower)


def one_sample_with_one_modality():
    """Every client has all modalities, and some of its samples A alone."""
    data = senses(2, batch_size=8)
    data.setup()
    for client in data.client_ids:
        few = torch.from_numpy(data.indices(client))[::3]
        for name in "DR":
            data._splits["train"].dataset.inputs[name][few] = float("nan")
    return data


@pytest.mark.parametrize("method", [FedMultimodal(), Harmony(stage1=1)], ids=["FedMultimodal", "Harmony"])
def test_samples_with_one_modality_are_judged_by_the_data(method):
    """The check takes a modality away; a sample of the first batch that then has none says nothing of the data."""
    module = network(unimodal_heads=True)
    trainer = federate(module, one_sample_with_one_modality(), [method], max_rounds=2)
    assert not trainer.summary.get("failures")
    with pytest.raises(ValueError, match=r"without 'A' Blind gives 'encoders\.A\.weight' a gradient"):
        federate(Blind(zeros=True), one_sample_with_one_modality(), [FedMultimodal()])


def test_control_variates_of_all_clients_are_refused_beside_encoders_of_some():
    callbacks = [FedMultimodal(weighting="uniform"), SCAFFOLD()]
    with pytest.raises(
        ValueError, match=r"FedMultimodal averages an encoder over the clients that have .* and SCAFFOLD "
    ):
        federate(network(), senses(3), callbacks)
    both = [FedMultimodal(weighting="uniform", holders_only=False), SCAFFOLD()]
    federate(network(), senses(3), both, max_rounds=1, local_steps=1)
