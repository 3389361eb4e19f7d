"""Backdoor: what is poisoned, what is measured, and that the pattern is learnt."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import FedAvg
from fedlightning.callbacks.attacks import Backdoor
from tests.helpers import Toy, ToyData, federate, generator, global_state, same, samples, toy_data

SIZES = {"0": 48, "1": 48, "2": 48}


class Sees(Toy):
    """A classifier of images of one channel and 2 x 3 pixels."""

    def forward(self, x):
        return self.net(x.flatten(1))


def images(sizes=SIZES):
    def of(client, split, count):
        x, y = samples(client, split, count, skew=0.0)
        return x.view(-1, 1, 2, 3), y

    return ToyData({
        client: {"train": of(client, "train", size), "val": of(client, "val", 30), "test": of(client, "test", 30)}
        for client, size in sizes.items()
    })  # fmt: skip


def module():
    torch.manual_seed(0)
    return Sees()


def test_the_first_share_of_a_batch_is_poisoned():
    x, y = torch.randn(8, 1, 4, 5, generator=generator("x")), torch.arange(8)
    bad, labels = Backdoor([0], target=9, share=0.25, size=2, value=5.0).poisoned((x, y))
    assert labels.tolist() == [9, 9, 2, 3, 4, 5, 6, 7]
    assert torch.equal(bad[2:], x[2:]) and bool((bad[:2, :, -2:, -2:] == 5).all())
    kept = torch.ones(4, 5, dtype=torch.bool)
    kept[-2:, -2:] = False
    assert torch.equal(bad[:2, :, kept], x[:2, :, kept])
    assert not torch.equal(bad, x) and y.tolist() == list(range(8))


def scores(trainer, metric="attack_success", split="val"):
    rows = [row for row in trainer.rows if (row.stage, row.split, row.metric) == ("G", split, f"{split}_{metric}")]
    last = max(row.round for row in rows)
    return {row.client: (row.value, row.num_samples) for row in rows if row.round == last}


def test_the_success_is_that_of_stamped_images_of_other_classes(tmp_path):
    data, attack = images(), Backdoor(["0"], target=1, size=1, value=9.0)
    trainer = federate(module(), data, [FedAvg(), attack], tmp_path, max_rounds=1)
    model = module()
    model.load_state_dict(global_state(trainer))
    for client, (value, _) in scores(trainer).items():
        x, y = data.tensors[client]["val"]
        stamped = x.clone()
        stamped[:, :, -1, -1] = 9.0
        taken = [int(model(one[None]).argmax()) == 1 for one, label in zip(stamped, y, strict=True) if label != 1]
        assert value == pytest.approx(sum(taken) / len(taken), abs=1e-6)


def test_training_poisons_and_scoring_does_not_change_the_model(tmp_path):
    options = {"max_rounds": 6, "local_epochs": 4}
    plain = federate(module(), images(), [FedAvg()], **options)
    watched = federate(module(), images(), [FedAvg(), Backdoor([], target=1, size=1, value=4.0)], tmp_path, **options)
    same(global_state(watched), global_state(plain))
    bad = Backdoor(["0", "1"], target=1, share=0.5, size=1, value=4.0)
    attacked = federate(module(), images(), [FedAvg(), bad], tmp_path, **options)
    clean, poisoned = (sum(value for value, _ in scores(one).values()) / 3 for one in (watched, attacked))
    assert poisoned > clean + 0.3
    attacked.test(verbose=False)
    assert scores(attacked, split="test")


def test_what_it_cannot_poison_is_said():
    with pytest.raises(ValueError, match=r"Backdoor needs batches \(x, y\) of images"):
        federate(Toy(), toy_data(), [Backdoor([0], target=1)], max_rounds=1)
    with pytest.raises(ValueError, match=r"Backdoor\(target=3\): the model knows the classes 0 to 2"):
        federate(module(), images(), [Backdoor([0], target=3)], max_rounds=1)
    with pytest.raises(ValueError, match="is to be made by client '7'"):
        federate(module(), images(), [Backdoor([7], target=1)], max_rounds=1)
    server = federate(module(), images(), [], max_rounds=1).server
    server.population.sites = {"0": "here"}
    with pytest.raises(ValueError, match="is an attack for simulations"):
        Backdoor([0], target=1).on_round_start(server)


@pytest.mark.parametrize(("count", "share", "poisoned"), [(9, 0.3, 3), (8, 0.3, 2), (2, 0.1, 1), (4, 1.0, 4)])
def test_the_share_of_a_batch_is_rounded_to_whole_images(count, share, poisoned):
    batch = torch.zeros(count, 1, 4, 4), torch.zeros(count, dtype=torch.int64)
    assert int(Backdoor([], target=1, share=share).poisoned(batch)[1].sum()) == poisoned
