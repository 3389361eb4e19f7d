"""Linear CKA: its invariances (sheet M4), and an independent computation by HSIC."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fedlightning.callbacks.diagnostics.similarity import cka_of_grams, linear_cka, pairwise_cka, unit_gram


def views(n: int = 40, p: int = 6, q: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(n, p, generator=draw) + 2.0
    return x, torch.tanh(x @ torch.randn(p, q, generator=draw)) + 0.3 * torch.randn(n, q, generator=draw)


def hsic_cka(x: torch.Tensor, y: torch.Tensor) -> float:
    """By numpy: HSIC(K, L) = tr(K H L H) with the centring matrix written out."""
    n = len(x)
    k, m = (a.double().numpy() @ a.double().numpy().T for a in (x, y))
    h = np.eye(n) - 1 / n

    def hsic(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.trace(a @ h @ b @ h))

    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def unbiased_hsic(k: np.ndarray, m: np.ndarray) -> float:
    """Song et al. 2012, equation 5, with sums over distinct indices."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    one = np.ones(n)
    cross = one @ k @ one * (one @ m @ one) / ((n - 1) * (n - 2))
    return float((np.trace(k @ m) + cross - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3)))


@pytest.mark.parametrize(("p", "q"), [(6, 9), (60, 9), (60, 70), (1, 1)])
def test_it_is_hsic_in_feature_and_in_gram_form(p, q):
    x, y = views(40, p, q)
    assert linear_cka(x, y) == pytest.approx(hsic_cka(x, y), abs=1e-10)
    assert cka_of_grams(unit_gram(x), unit_gram(y)) == pytest.approx(hsic_cka(x, y), abs=1e-10)


def test_debiased_is_the_ratio_of_unbiased_hsics():
    x, y = views(12, 30, 5)
    k, m = ((a.double() @ a.double().T).numpy() for a in (x, y))
    expected = unbiased_hsic(k, m) / np.sqrt(unbiased_hsic(k, k) * unbiased_hsic(m, m))
    assert linear_cka(x, y, debiased=True) == pytest.approx(expected, abs=1e-9)


def test_debiased_does_not_find_likeness_in_few_samples_of_many_random_features():
    draw = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(16, 500, generator=draw), torch.randn(16, 500, generator=draw)) for _ in range(20)]
    plain, debiased = ([linear_cka(x, y, flag) for x, y in pairs] for flag in (False, True))
    assert np.mean(plain) > 0.9
    assert abs(np.mean(debiased)) < 0.05


@pytest.mark.parametrize("debiased", [False, True])
def test_invariances(debiased):
    x, y = views()
    score = linear_cka(x, y, debiased)
    rotation, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    for other in (x @ rotation, 1e-6 * x, -3e8 * x, x + 5.0):
        assert linear_cka(other, y, debiased) == pytest.approx(score, abs=1e-5)
    assert linear_cka(x[shuffled], y[shuffled], debiased) == pytest.approx(score, abs=1e-10)
    assert linear_cka(y, x, debiased) == pytest.approx(score, abs=1e-12)
    assert linear_cka(x, x, debiased) == pytest.approx(1.0, abs=1e-12)
    assert linear_cka(x * torch.tensor([100.0, 1, 1, 1, 1, 1]), y, debiased) != pytest.approx(score, abs=1e-2)
    assert 0 < score < 1


def test_more_dimensions_are_flattened():
    x, y = views(20, 24, 9)
    assert linear_cka(x.reshape(20, 2, 3, 4), y) == linear_cka(x, y)


@pytest.mark.parametrize("p", [3, 50])
def test_no_spread_is_zero_with_a_warning(p):
    with pytest.warns(UserWarning, match="same for every sample"):
        assert linear_cka(torch.ones(20, p), views(20)[0]) == 0.0


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="same samples: got 20 and 40"):
        linear_cka(views(20)[0], views(40)[0])
    with pytest.raises(ValueError, match="at least 4 samples"):
        linear_cka(*views(3), debiased=True)


def test_pairs_of_models_of_different_widths():
    models = [views(30, width)[0] for width in (4, 6, 90)]
    table = pairwise_cka([unit_gram(model) for model in models])
    for i, j in itertools.product(range(3), repeat=2):
        assert float(table[i, j]) == pytest.approx(linear_cka(models[i], models[j]), abs=1e-10)
