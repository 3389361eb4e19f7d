"""Sources of randomness with seeds of their own: each changes what it names, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.callbacks import IFCA, FedAvg, FedGroup, Harmony, PoissonSampling
from fedlightning.commands.run import Commands
from fedlightning.options import Seeds
from fedlightning.seeding import generator
from tests.helpers import Toy, global_state, make_trainer, toy_data

MODEL = ["--model=Classifier", "--model.net=MLP", "--model.net.in_features=64", "--model.net.hidden=[4]"]
WORDS = [*MODEL, "--model.net.num_classes=10", "--model.num_classes=10", "--data=DigitsDataModule"]


class Watching(FederatedCallback):
    """Notes who takes part, and the first models."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.first: dict[str, torch.Tensor] = {}

    def on_broadcast(self, server, job, message):
        self.seen.append((server.round, job.client))
        if not self.first:
            models = server.models.items()
            self.first = {f"{key} {name}": value.clone() for key, model in models for name, value in model.items()}


def federate(root, seed, method=None, **options):
    """The participants of three rounds, the first models and the last."""
    torch.manual_seed(0)
    watching = Watching()
    options = {"participation": 3, "max_rounds": 3} | options
    trainer = make_trainer(root, [method or FedAvg(), watching], seed=seed, save_state=0, **options)
    trainer.fit(Toy(dropout=0.2), datamodule=toy_data((24, 16, 20, 24, 16, 12)))
    last = {} if isinstance(method, IFCA) else global_state(trainer)
    watching = next(callback for callback in trainer.callbacks if isinstance(callback, Watching))
    return watching.seen, watching.first, last


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", [None, PoissonSampling(0.5)])
def test_the_participation_seed_changes_only_who_takes_part(method, tmp_path):
    options = {} if method is None else {"participation": 1.0}
    plain = federate(tmp_path / "plain", 1, method, **options)
    same = federate(tmp_path / "same", Seeds(1, participation=1), method, **options)
    other = federate(tmp_path / "other", Seeds(1, participation=2), method, **options)
    order = federate(tmp_path / "order", Seeds(5, participation=2), method, **options)
    assert plain[0] == same[0] and equal(plain[2], same[2])
    assert other[0] != plain[0] and equal(other[1], plain[1])
    assert order[0] == other[0] and not equal(order[2], other[2])


def test_the_participation_seed_chooses_who_trains_before_the_first_round(tmp_path):
    seen = [
        federate(tmp_path / str(run), Seeds(run, participation=participation), FedGroup(num_clusters=1, alpha=2))[0]
        for run, participation in ((1, 2), (5, 2), (1, 3))
    ]
    assert seen[0] == seen[1] and seen[0][:2] != seen[2][:2]


def test_the_participation_seed_chooses_who_takes_part_in_harmonys_second_stage():
    several = [str(number) for number in range(20)]

    def drawn(seeds):
        server = SimpleNamespace(participants=lambda: several[:5])
        server.rng = lambda purpose, source="run": generator(seeds.of(source), 0, "server", purpose)
        return Harmony._drawn(server, several)

    assert drawn(Seeds(1, participation=2)) == drawn(Seeds(5, participation=2)) == drawn(Seeds(2))
    assert drawn(Seeds(1, participation=2)) != drawn(Seeds(1))


def test_everybody_alike_takes_part_whatever_that_seed_is(tmp_path):
    runs = [federate(tmp_path / str(seed), Seeds(1, participation=seed), participation=1.0) for seed in (1, 2)]
    assert runs[0][0] == runs[1][0] and equal(runs[0][2], runs[1][2])


def test_the_initialisation_seed_changes_only_first_weights(tmp_path):
    runs = {
        seed: federate(tmp_path / str(number), seed, IFCA(num_clusters=3))
        for number, seed in enumerate((1, Seeds(1, initialisation=2), Seeds(9, initialisation=2, participation=1)))
    }
    plain, other, order = runs.values()
    assert not equal(other[1], plain[1]) and other[0] == plain[0]  # IFCA draws its other centres
    assert equal(order[1], other[1]) and order[0] == other[0]


@pytest.mark.parametrize("kind", ["words", "file"])
def test_a_configuration_makes_its_module_of_the_initialisation_seed(kind, tmp_path):
    def weights(run, initialisation=None):
        given = {"run": run} | ({} if initialisation is None else {"initialisation": initialisation})
        words = [f"--trainer.seed.{name}={seed}" for name, seed in given.items()]
        if kind == "file":
            (tmp_path / "seed.yaml").write_text(f"trainer: {{seed: {given}}}".replace("'", ""))
            words = ["--config", str(tmp_path / "seed.yaml")]
        return Commands("fit", [*words, *WORDS]).model.state_dict()

    plain = Commands("fit", ["--trainer.seed=3", *WORDS]).model.state_dict()
    assert equal(weights(3), plain) and equal(weights(4, 3), plain) and not equal(weights(3, 4), plain)
