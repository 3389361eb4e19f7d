"""How alike blocks are, their groups, the rules of candidates, and the losses of fine-tuning."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks.shared.blocks import (
    Part,
    candidates,
    cka,
    contrastive,
    grouped,
    nearest_teachers,
    similarities,
    unit_gram,
    view,
)


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def by_hand(x, y):
    """Linear CKA by its formula, with the centring matrix written out."""
    n = len(x)
    centre = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)
    k, m = (centre @ z.double() @ z.double().T @ centre for z in (x, y))
    return float((k * m).sum() / (k.square().sum().sqrt() * m.square().sum().sqrt()))


def test_cka_is_its_formula_and_in_the_unit_interval():
    for seed in range(5):
        x, y = torch.randn(9, 4, generator=draw(seed)), torch.rand(9, 7, generator=draw(seed + 9)) + 100
        assert cka(x, y) == pytest.approx(by_hand(x, y), abs=1e-9) == cka(y, x)
        assert 0 <= cka(x, y) <= 1 and cka(x, x) == pytest.approx(1)
    assert cka(x.reshape(9, 2, 2), y) == cka(x, y)


def test_turns_shifts_and_scales_do_not_change_cka():
    x, y = torch.randn(9, 4, generator=draw()), torch.randn(9, 5, generator=draw(1))
    turn = torch.linalg.qr(torch.randn(4, 4, generator=draw(2)))[0]
    for other in (x @ turn, 1e-6 * x, 1e5 * x, x + 3 * torch.randn(4, generator=draw(3))):
        assert cka(other, y) == pytest.approx(cka(x, y), abs=1e-4)
    assert cka(x, torch.full((9, 3), 2.5)) == cka(torch.zeros(9, 2), torch.zeros(9, 2)) == 0  # a dead block


def test_two_blocks_are_as_alike_as_what_goes_in_and_comes_out():
    x = [torch.randn(8, 3, generator=draw(i)) for i in range(6)]
    grams = [unit_gram(part) for part in x]
    alike = similarities(grams[:3], grams[3:])
    for a, b in itertools.product(range(3), repeat=2):
        assert float(alike[a, b]) == pytest.approx(cka(x[a], x[b]) + cka(x[3 + a], x[3 + b]), abs=1e-12)


@pytest.mark.parametrize("how", ["medoids", "means"])
@pytest.mark.parametrize("count", [1, 2, 4, 20])
def test_each_block_is_in_one_group_and_no_group_is_empty(how, count):
    grams = [unit_gram(torch.randn(8, 3, generator=draw(i))) for i in range(6)]
    grams += [grams[0], grams[1] * (1 + 1e-7)]  # some are equal, and one is but for rounding
    groups = grouped(similarities(grams, grams), count, how, seed=0)
    assert len(groups) == 8 and set(groups) == set(range(max(groups) + 1))
    assert len(set(groups)) == min(count, 8 if how == "medoids" else 6)


@pytest.mark.parametrize("how", ["medoids", "means"])
def test_blocks_of_one_function_are_one_group(how):
    sources = [torch.randn(12, 4, generator=draw(i)) for i in range(3)]
    rows = [sources[i % 3] + 0.05 * torch.randn(12, 4, generator=draw(10 + i)) for i in range(9)]
    grams = [unit_gram(row) for row in rows]
    assert grouped(similarities(grams, grams), 3, how, seed=0) == [0, 1, 2] * 3


def test_medoids_are_the_best_ones():
    """Against all choices, on distances 1 / (CKA + CKA); greedy starts alone are not the best for each of these."""
    for seed in range(6):
        alike = torch.rand(7, 7, generator=draw(seed), dtype=torch.float64) + 0.05
        alike = (alike + alike.T).fill_diagonal_(2)
        apart = (1 / alike).fill_diagonal_(0)
        groups = grouped(alike, 3, "medoids", 0)

        def cost(medoids, apart=apart):
            return float(apart[:, list(medoids)].min(1).values.sum())

        best = min(map(cost, itertools.combinations(range(7), 3)))
        inner = sum(
            min(sum(float(apart[i, m]) for i in members) for m in members)
            for members in ([i for i in range(7) if groups[i] == k] for k in range(3))
        )
        assert inner == pytest.approx(best, rel=0.02)


def parts_of(shapes):
    """By client, how many convolutions and how many other layers."""
    return [
        Part(client, depth, 2 if depth == convs + fcs - 1 else int(depth >= convs), "conv" if depth < convs else "fc")
        for client, (convs, fcs) in enumerate(shapes)
        for depth in range(convs + fcs)
    ]


@pytest.mark.parametrize("depths", [(4, 6), (2, 3), (9, 9)])
def test_candidates_keep_the_rules(depths):
    parts = parts_of([(2, 2), (0, 3), (3, 1), (12, 2)])
    groups = [place % 3 for place in range(len(parts))]
    found = candidates(parts, groups, 12, depths, ["conv", "fc"], draw())
    assert len(found) == 12 and len({frozenset(places) for places in found}) == 12
    for places in found:
        assert depths[0] <= len(places) <= depths[1] or len(places) == 3 > depths[1]
        assert len(set(places)) == len(places)
        assert {groups[place] for place in places} == {0, 1, 2}
        chosen = [parts[place] for place in places]
        assert {part.kind for part in chosen} == {"conv", "fc"}
        order = [(part.rank, part.depth) for part in chosen]
        assert order == sorted(order)  # as numbers: layer 10 is behind layer 9
    assert found == candidates(parts, groups, 12, depths, ["conv", "fc"], draw())


def test_few_blocks_give_few_candidates_and_what_does_not_fit_is_left_out():
    parts = parts_of([(0, 2)])
    assert candidates(parts, [0, 1], 4, (4, 6), ["fc"], draw()) == [[0, 1]]
    assert candidates(parts, [0, 1], 4, (4, 6), ["conv"], draw()) == []
    parts = parts_of([(0, 2), (0, 2)])
    found = candidates(parts, [0, 0, 1, 1], 50, (2, 2), [], draw(), lambda places: parts[places[-1]].client == 1)
    assert sorted(found) == [[0, 2], [0, 3], [1, 3]]  # [2, 1] ends with a block of the other client


def test_a_candidate_that_is_the_own_model_wins():
    z = [torch.randn(6, 3, generator=draw(i)) for i in range(4)]
    assert nearest_teachers(z[:2], [z[2], 4 * z[1], z[3], z[0], z[0]]) == [3, 1]  # of equal ones the first
    assert nearest_teachers([z[0]], [torch.zeros(6, 3), -z[0]]) == [0]


def test_nt_xent_is_its_formula():
    first, second = torch.randn(4, 3, generator=draw()), torch.randn(4, 3, generator=draw(1))
    z = torch.cat([first, second])
    total = 0.0
    for i in range(8):
        similar = [math.exp(float(F.cosine_similarity(z[i], z[k], dim=0)) / 0.5) for k in range(8)]
        total -= math.log(similar[(i + 4) % 8] / sum(similar[k] for k in range(8) if k != i))
    assert float(contrastive(first, second, 0.5)) == pytest.approx(total / 8, rel=1e-5)


def test_views_move_images_by_an_eighth_at_most_and_differ():
    x = torch.zeros(40, 2, 16, 8)
    x[:, :, 7, 3] = 5.0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        seen, flat = view(x, 0.0), view(torch.ones(3, 4).cumsum(0), 0.1)
    assert seen.shape == x.shape and flat.shape == (3, 4)
    places = (seen[:, 0] == 5).nonzero()
    assert len(places) == 40 and torch.equal(seen[:, 0], seen[:, 1])
    assert set((places[:, 1] - 7).tolist()) == {-2, -1, 0, 1, 2} and set((places[:, 2] - 3).tolist()) == {-1, 0, 1}
    assert 0 < float((flat - torch.ones(3, 4).cumsum(0)).abs().max()) < 0.5
