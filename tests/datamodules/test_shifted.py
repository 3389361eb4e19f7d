import numpy as np
import pytest
import torch

from fedlightning.algorithm import FederatedCallback
from fedlightning.callbacks import Central
from fedlightning.contract import Facts
from fedlightning.datamodules import (
    ArrayDataset,
    ArrayFederatedDataModule,
    DigitsDataModule,
    IIDPartitioner,
    LazyClients,
    ShiftedDataModule,
)
from fedlightning.datamodules.shifted import rotated
from fedlightning.models import MLP, Classifier
from tests.helpers import make_trainer


class Images(ArrayFederatedDataModule):
    def load(self):
        x = torch.rand(60, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        y = torch.arange(60) % 5
        return ArrayDataset(x, y), ArrayDataset(x[:20].clone(), y[:20])


def pair(clients=3, **options):
    source = Images(IIDPartitioner(clients), seed=1)
    data = ShiftedDataModule(Images(IIDPartitioner(clients), seed=1), **options)
    source.setup()
    data.setup()
    return source, data


def samples(data, client, split="train"):
    view = data.client_dataloader(client, split).dataset
    return torch.stack([view[k][0] for k in range(len(view))]), torch.tensor(
        [int(view[k][1]) for k in range(len(view))]
    )


def test_the_first_client_stays_and_noise_grows():
    source, data = pair(features="noise", strength=4.0)
    deviations = []
    for client in source.client_ids:
        (x, y), (shifted, labels) = samples(source, client), samples(data, client)
        assert torch.equal(y, labels) and source.num_samples(client) == data.num_samples(client)
        deviations.append(float((shifted - x).std()))
    assert (
        deviations[0] == 0
        and deviations[1] == pytest.approx(2**0.5, rel=0.1)
        and deviations[2] == pytest.approx(2, rel=0.1)
    )
    assert torch.equal(samples(data, "2")[0], samples(data, "2")[0])
    (batch,) = [x for x, _ in data.client_dataloader("2", "test")]
    assert torch.equal(batch, samples(data, "2", "test")[0])  # one by one and as a batch


def test_contrast_keeps_the_mean():
    source, data = pair(features="contrast", strength=0.5)
    x, shifted = samples(source, "2")[0], samples(data, "2")[0]
    assert torch.allclose(x.mean((1, 2, 3)), shifted.mean((1, 2, 3)), atol=1e-6)
    assert torch.allclose(shifted.flatten(1).std(1), 0.5 * x.flatten(1).std(1), atol=1e-6)


def test_rotation_turns_images():
    source, data = pair(features="rotation", strength=180.0)
    x = samples(source, "1")[0]
    assert torch.allclose(samples(data, "1")[0], x.rot90(1, (2, 3)), atol=1e-4)
    assert torch.allclose(samples(data, "2")[0], samples(source, "2")[0].rot90(2, (2, 3)), atol=1e-4)
    wide = torch.zeros(1, 1, 5, 9)
    wide[0, 0, 2, 4 + 2] = 1  # right of the middle by two pixels
    turned = rotated(wide, 90)
    assert float(turned[0, 0, 0, 4]) == pytest.approx(1, abs=1e-4) and float(turned.sum()) == pytest.approx(1, abs=1e-4)
    with pytest.raises(ValueError, match="Only images"):
        rotated(torch.zeros(3, 4), 10)


def test_concepts_permute_labels_alike_in_all_splits():
    source, data = pair(4, concepts=2)
    assert data.planted_groups == {"0": 0, "1": 1, "2": 0, "3": 1}
    names = {}
    for client in source.client_ids:
        for split in ("train", "val", "test"):
            (x, y), (same, labels) = samples(source, client, split), samples(data, client, split)
            assert torch.equal(x, same)
            for one, other in zip(y.tolist(), labels.tolist(), strict=True):
                assert names.setdefault((data.planted_groups[client], one), other) == other
            assert data.class_counts(client, split) == np.bincount(labels.numpy(), minlength=5).tolist()
    assert all(names[0, label] == label for label in range(5)) and any(names[1, label] != label for label in range(5))
    changed = np.mean([names[1, label] != label for label in range(5)])
    assert data.difference["concepts"] == pytest.approx(
        changed * 4 / 6
    )  # four of the six pairs are of different concepts


@pytest.mark.slow
def test_concepts_hurt_one_model_for_all(tmp_path):
    accuracy = []
    for concepts in (1, 4):
        data = ShiftedDataModule(DigitsDataModule(IIDPartitioner(4), flatten=True, max_train=400), concepts=concepts)
        trainer = make_trainer(tmp_path / str(concepts), max_rounds=8, local_epochs=2)
        trainer.fit(Classifier(MLP(64, [], 10), 10, lr=0.5), data)
        rows = trainer.test()
        accuracy.append(next(r["mean"] for r in rows if r["stage"] == "G" and r["metric"] == "test_accuracy"))
    assert accuracy[0] > 0.75 > 0.7 > accuracy[1]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="features='noise' and strength=0"):
        ShiftedDataModule(Images(), features="noise")
    with pytest.raises(ValueError, match=r"contrast needs a strength in \(0, 1\]"):
        ShiftedDataModule(Images(), features="contrast", strength=2.0)
    with pytest.raises(ValueError, match="'none' needs 0"):
        ShiftedDataModule(Images(), strength=1.0)
    with pytest.raises(ValueError, match="public data"):
        ShiftedDataModule(Images(public=0.1), concepts=2)
    with pytest.raises(ValueError, match=r"got source=<LazyClients.*Use an IndexedFederatedDataModule"):
        ShiftedDataModule(LazyClients(3, lambda k: {}, sizes={"train": 1}))


def test_one_client_alone_is_refused():
    with pytest.raises(ValueError, match="has 1 client, and the first one stays as it is"):
        pair(1, features="noise", strength=1.0)


def test_other_shifts_are_other_data():
    prints = {pair(**options)[1].fingerprint("train") for options in (
        {}, {"features": "noise", "strength": 1.0}, {"features": "noise", "strength": 2.0}, {"concepts": 2}
    )}  # fmt: skip
    assert len(prints) == 4


@pytest.mark.parametrize("features, strength", [("noise", 4.0), ("rotation", 60.0), ("contrast", 0.5)])
def test_a_growing_shift_is_the_constant_one_of_each_round(features, strength):
    _, grows = pair(features=features, strength=strength, grows_over=4)
    assert grows.drifts and grows.sizes_by_round("2") == [grows.num_samples("2")]
    for round, share in ((0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0)):
        now = grows.at_round(round)
        still = pair(features=features, strength=share * strength)[1] if share else pair(concepts=1)[0]
        for client in now.client_ids:
            assert torch.equal(samples(now, client)[0], samples(still, client)[0])
            whole = pair(features=features, strength=strength)[1]
            assert torch.equal(samples(now, client, "test")[0], samples(whole, client, "test")[0])
    assert not torch.equal(samples(grows, "2")[0], samples(grows.at_round(1), "2")[0])  # a copy leaves the data alone


def run(path, rounds=4, data=None, resume=None, **options):
    data = data or ShiftedDataModule(
        DigitsDataModule(IIDPartitioner(3), flatten=True, max_train=90), features="noise", strength=3.0, grows_over=3
    )
    torch.manual_seed(0)
    trainer = make_trainer(path, max_rounds=rounds, save_state=1, **options)
    trainer.fit(Classifier(MLP(64, [], 10), 10, lr=0.1), data, resume=resume)
    return trainer.server.model


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("options", [{"engine": "vectorized"}, {"engine": "processes"}], ids=str)
def test_a_growing_shift_is_the_same_in_all_engines(tmp_path, options):
    one, other = run(tmp_path / "one"), run(tmp_path / "other", **options)
    for name in one:
        atol = 0 if options["engine"] == "processes" else 1e-5
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=atol)


def test_the_union_of_clients_grows_too(tmp_path):
    class Unions(FederatedCallback):
        facts = Facts(takes_part=False)

        def on_broadcast(self, server, job, message):
            loader = trainer.federation.engine.runner.pooled_dataloader("train", message.round)
            seen[message.round] = torch.stack([x for x, _ in loader.dataset])

    seen: dict[int, torch.Tensor] = {}
    data = ShiftedDataModule(
        DigitsDataModule(IIDPartitioner(3), flatten=True, max_train=90), features="noise", strength=3.0, grows_over=2
    )
    trainer = make_trainer(tmp_path, [Unions(), Central()], max_rounds=4)
    trainer.fit(Classifier(MLP(64, [], 10), 10, lr=0.1), data)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2]) and torch.equal(seen[2], seen[3])


def test_a_growing_shift_changes_the_run_by_the_round(tmp_path):
    still = DigitsDataModule(IIDPartitioner(3), flatten=True, max_train=90)
    assert equal(run(tmp_path / "a", 1), run(tmp_path / "b", 1, still))  # nothing has grown in round 0
    assert not equal(run(tmp_path / "c", 2), run(tmp_path / "d", 2, still))


def test_only_features_grow():
    with pytest.raises(ValueError, match="grows_over=3 and features='none'; only a feature shift grows"):
        ShiftedDataModule(Images(), concepts=2, grows_over=3)


def test_a_growing_shift_goes_on_where_a_run_was_cut(tmp_path):
    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", 2)
    assert equal(whole, run(tmp_path / "cut", 4, resume="last"))
