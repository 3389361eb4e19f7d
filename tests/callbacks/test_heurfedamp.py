"""HeurFedAMP: sheet entry 30; what it shares with FedAMP, and its conformance case, is in test_fedamp.py."""

from __future__ import annotations

import numpy as np
import pytest

from fedlightning.callbacks import HeurFedAMP
from tests.helpers import Quadratic, close, quadratic_data, spied

A = [[1.0, 2.0, 0.5], [2.0, 1.0, 1.0], [0.5, 0.5, 2.0], [1.0, 1.0, 1.0]]
B = [[1.0, 0.0, -1.0], [1.2, 0.1, -0.8], [-3.0, 2.0, 4.0], [0.5, 0.5, 0.5]]


def attention(w, sigma, itself):
    """Rows of ``xi``, in numpy: ``(1 - xi_ii) softmax_{j != i}(sigma cos(w_i, w_j))``."""
    unit = w / np.linalg.norm(w, axis=1, keepdims=True)
    cosines, n = unit @ unit.T, len(w)
    if sigma is None:
        sigma = 1 / np.mean([1 - cosines[i, j] for i in range(n) for j in range(i)])
    weights = np.exp(sigma * cosines) * (1 - np.eye(n))
    return (1 - itself) * weights / weights.sum(1, keepdims=True) + itself * np.eye(n)


@pytest.mark.parametrize(("sigma", "xi_self"), [(None, None), (3.0, 0.4), (0.0, 0.0)])
@pytest.mark.parametrize("start", ["cloud", "own"])
def test_a_federation_by_hand(sigma, xi_self, start):
    """Every client starts from its mean ``u_i`` or its own model and is pulled to ``u_i`` by ``lam / alpha``."""
    callback = HeurFedAMP(lam=0.5, alpha=2.0, sigma=sigma, xi_self=xi_self, alpha_decay=0.5, start=start)
    _, spy = spied(Quadratic(0.1), quadratic_data(A, B), [callback], max_rounds=4, local_epochs=2)
    a, b, w = np.array(A), np.array(B), np.zeros((4, 3))
    for number in range(4):
        u = attention(w, sigma, 1 / 4 if xi_self is None else xi_self) @ w if number else w
        for client, sent in zip("0123", u, strict=True):
            message = next(m for m in spy.messages if (m.round, m.client) == (number, client))
            np.testing.assert_allclose(message.state["w"], sent, atol=1e-12)
        w = u.copy() if start == "cloud" else w.copy()
        for _ in range(2):
            w = w - 0.1 * (a * (w - b) + 0.5 / (2.0 * 0.5**number) * (w - u))
    for client, row in zip("0123", w, strict=True):
        np.testing.assert_allclose(spy.of_round(3)[client].state["w"], row, atol=1e-12)


def test_a_client_that_keeps_all_its_weight_is_alone():
    _, spy = spied(Quadratic(0.1), quadratic_data(A, B), [HeurFedAMP(xi_self=1.0)], max_rounds=3)
    for message in (m for m in spy.messages if m.round > 0):
        close(message.state, spy.of_round(message.round - 1)[message.client].state, atol=1e-14)


@pytest.mark.parametrize(
    "options", [{"xi_self": -0.1}, {"xi_self": 1.1}, {"sigma": -1.0}, {"sigma": float("inf")}], ids=str
)
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"HeurFedAMP got {next(iter(options))}="):
        HeurFedAMP(**options)
