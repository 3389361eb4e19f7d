"""Two rounds of ClientDP(quantile=...) and of FLTrust beside numpy written from the papers alone.

Andrew et al. 2021 (algorithm 1) and Cao et al. 2021 (algorithm 2).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import ClientDP, FedAvg, FLTrust, client_dp
from fedlightning.callbacks.shared import secret_noise
from tests.helpers import Quadratic, ToyData, federate, global_state

LR, STEPS, ON_CHANGE, ON_COUNT = 0.1, 3, 0.37, -0.8
DRAW = np.random.default_rng(3)
ROWS = {
    str(client): (DRAW.uniform(0.5, 1.5, (count, 3)), DRAW.normal(0.0, spread, (count, 3)))
    for client, (count, spread) in enumerate([(4, 0.1), (6, 1.0), (5, 3.0), (7, 0.4), (3, 6.0)])
}
ROOT = DRAW.uniform(0.5, 1.5, (6, 3)), DRAW.normal(0.5, 1.0, (6, 3))


class Rooted(ToyData):
    """Clients, and root data of the server."""

    def public_dataloader(self):
        return DataLoader(TensorDataset(*(torch.from_numpy(rows) for rows in ROOT)), batch_size=16)


class Participants(FedAvg):
    """Names of those who took part, by round."""

    came: list

    def on_visit_start(self, client):
        self.came.append((client.round, client.id))


def data():
    splits = {
        client: dict.fromkeys(("train", "val", "test"), tuple(torch.from_numpy(rows) for rows in of_client))
        for client, of_client in ROWS.items()
    }
    return Rooted(splits, batch_size=16)


def trained(w, rows, steps, lr=LR):
    """Steps of gradient descent over all rows."""
    a, b = rows
    for _ in range(steps):
        w = w - lr * (a * (w - b)).mean(0)
    return w


def adaptive_dp(rounds, of_round, z, clip, quantile, clip_lr, expected):
    """Andrew et al. 2021, algorithm 1, with known noise; the deviation of the count is m / 20, and z at least."""
    of_count = max(expected / 20.0, z)
    of_change = 1.0 / np.sqrt(z**-2 - (2.0 * of_count) ** -2)
    w = np.zeros(3)
    for round in range(rounds):
        total, within = np.zeros(3), 0.0
        for client in of_round[round]:
            change = trained(w, ROWS[client], STEPS) - w
            length = np.sqrt((change**2).sum())
            within += length <= clip
            total += change * min(1.0, clip / length)
        w = w + (total + of_change * clip * ON_CHANGE) / expected
        clip = clip * np.exp(-clip_lr * ((within + of_count * ON_COUNT) / expected - quantile))
    return w, clip


@pytest.mark.parametrize(("rate", "z", "quantile"), [(1.0, 0.2, 0.5), (0.6, 0.2, 0.8), (1.0, 1.5, 0.3)])
def test_two_rounds_of_adaptive_clipping(monkeypatch, rate, z, quantile):
    def known(secret, address, shape):
        return torch.full(shape, ON_CHANGE if shape.numel() > 1 else ON_COUNT, dtype=torch.float64)

    monkeypatch.setattr(secret_noise, "normal", known)
    monkeypatch.setattr(client_dp, "normal", known)
    look = Participants(weighting="uniform")
    look.came = []
    options = {"delta": 1e-3, "noise_multiplier": z, "clip": 0.3, "rate": rate, "clip_lr": 0.7}
    options["noise_seed"] = 5  # with which as many come to each round as are expected, over whom the reference counts
    dp = ClientDP(quantile=quantile, **options)
    trainer = federate(Quadratic(LR), data(), [look, dp], max_rounds=2, local_steps=STEPS)
    of_round = [[client for round, client in look.came if round == wanted] for wanted in range(2)]
    w, clip = adaptive_dp(2, of_round, z, 0.3, quantile, 0.7, rate * len(ROWS))
    np.testing.assert_allclose(global_state(trainer)["w"].numpy(), w, rtol=1e-9, atol=1e-9)
    assert trainer.server.state["ClientDP"]["clip"] == pytest.approx(clip, rel=1e-12)


def test_two_rounds_of_fltrust():
    """Cao et al. 2021: equations 2 to 4, with a global learning rate of 1."""
    w = np.zeros(3)
    for _ in range(2):
        own = trained(w, ROOT, 2, lr=0.05) - w
        total, trust = np.zeros(3), 0.0
        for rows in ROWS.values():
            change = trained(w, rows, STEPS) - w
            length, own_length = np.sqrt((change**2).sum()), np.sqrt((own**2).sum())
            score = max(0.0, (change * own).sum() / length / own_length)
            total, trust = total + score * own_length / length * change, trust + score
        w = w + total / trust
    callbacks = [FLTrust(lr=0.05, epochs=2, batch_size=16)]
    trainer = federate(Quadratic(LR), data(), callbacks, max_rounds=2, local_steps=STEPS)
    np.testing.assert_allclose(global_state(trainer)["w"].numpy(), w, rtol=1e-9, atol=1e-9)
