import numpy as np
import pytest
import torch

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


def test_other_shifts_are_other_data():
    prints = {pair(**options)[1].fingerprint("train") for options in (
        {}, {"features": "noise", "strength": 1.0}, {"features": "noise", "strength": 2.0}, {"concepts": 2}
    )}  # fmt: skip
    assert len(prints) == 4
