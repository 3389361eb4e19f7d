"""A CombinedLoader for a client: labelled and unlabelled batches in one step, as mean teachers and FixMatch take them."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import SCAFFOLD, Central, FedALA, PerFedAvg
from fedlightning.datamodules import LoaderDataModule
from fedlightning.errors import ConfigurationError
from tests.helpers import Toy, global_state, make_trainer, same

LABELLED, UNLABELLED = 6, 16


class Semi(Toy):
    """A step on a dict: a loss on labelled samples, and agreement of two noisy views of unlabelled ones."""

    def __init__(self, keys=("labelled", "unlabelled")):
        super().__init__()
        self.keys, self.seen = keys, []

    def training_step(self, batch, batch_idx):
        labelled, (x,) = batch[self.keys[0]], batch[self.keys[1]]
        self.seen.append((len(labelled[0]), len(x)))
        views = [self(x + 0.1 * torch.randn_like(x)) for _ in range(2)]
        return super().training_step(labelled, batch_idx) + torch.nn.functional.mse_loss(*views)


def loaders(client, generator=False, workers=0):
    torch.manual_seed(client)
    x, y, u = torch.randn(LABELLED, 6), torch.randint(3, (LABELLED,)), torch.randn(UNLABELLED + client, 6)
    own = torch.Generator().manual_seed(client) if generator else None
    return {
        "labelled": DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True, generator=own),
        "unlabelled": DataLoader(TensorDataset(u), batch_size=4, shuffle=True, num_workers=workers),
    }


def fitted(root=None, mode="max_size_cycle", form=dict, callbacks=(), resume=None, generator=False, **options):
    given = {str(client): loaders(client, generator) for client in range(2)}
    keys = ("labelled", "unlabelled") if form is dict else (0, 1)
    train = {name: CombinedLoader(pair if form is dict else list(pair.values()), mode) for name, pair in given.items()}
    val = {name: pair["labelled"] for name, pair in given.items()}
    trainer = make_trainer(root, list(callbacks) or [SCAFFOLD()], **{"max_rounds": 2, **options})
    module = Semi(keys)
    trainer.fit(module, train_dataloaders=train, val_dataloaders=val, resume=resume)
    return trainer


def test_nothing_is_said_of_generators_that_every_epoch_seeds(recwarn):
    LoaderDataModule({"a": CombinedLoader(loaders(0, generator=True))})
    assert not [one for one in recwarn.list if "generator" in str(one.message)]


def test_a_step_gets_dicts_of_batches_and_all_samples_count():
    data = LoaderDataModule({"a": CombinedLoader(loaders(0), "max_size_cycle")})
    loader = data.client_dataloader("a", "train")
    assert data.num_samples("a") == LABELLED + UNLABELLED and len(loader) == 4
    batches = list(loader)
    assert [len(batch["labelled"][0]) for batch in batches] == [2, 2, 2, 2]
    assert sorted(torch.cat([batch["unlabelled"][0][:, 0] for batch in batches]).tolist()) == sorted(
        loader.dataset.loaders[1].dataset.tensors[0][:, 0].tolist()
    )
    short = LoaderDataModule({"a": CombinedLoader(loaders(0), "min_size")}).client_dataloader("a", "train")
    assert len(short) == len(list(short)) == 3


@pytest.mark.parametrize(("form", "generator"), [(dict, False), (list, True)])
def test_again_and_by_lightnings_trainer_it_is_the_same_to_the_bit(form, generator):
    first = global_state(fitted(form=form, generator=generator))
    same(first, global_state(fitted(form=form, generator=generator, local_loop="trainer")))


@pytest.mark.slow
def test_processes_agree_to_the_bit():
    same(global_state(fitted(generator=True)), global_state(fitted(generator=True, engine="processes")))


def test_a_resumed_run_goes_on_with_the_same_batches(tmp_path):
    fitted(tmp_path, save_state=1, generator=True, max_rounds=1)
    trainer = fitted(tmp_path, save_state=1, generator=True, resume="last")
    assert trainer.rounds_done == 2
    same(global_state(trainer), global_state(fitted(generator=True)))


def test_central_trains_on_all_of_them():
    assert fitted(callbacks=[Central()]).rounds_done == 2


@pytest.mark.parametrize("method", [PerFedAvg, FedALA])
def test_methods_that_draw_more_batches_draw_joint_ones(method):
    first = fitted(callbacks=[method()], generator=True)
    assert first.rounds_done == 2
    same(global_state(first), global_state(fitted(callbacks=[method()], generator=True)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            lambda: CombinedLoader(loaders(0), "sequential"),
            "of mode 'sequential', with which a step gets the batch of one",
        ),
        (lambda: CombinedLoader([CombinedLoader([])]), "a CombinedLoader in a CombinedLoader"),
        (lambda: {"x": loaders(0)["labelled"]}, "is a dict of several loaders. .*CombinedLoader"),
    ],
)
def test_what_gives_no_joint_batches_is_refused(given, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        make_trainer(None).fit(Semi(), train_dataloaders={"a": given()})
