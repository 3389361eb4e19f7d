import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedlightning.datamodules import (
    DirichletPartitioner,
    IIDPartitioner,
    LabelQuantitySkewPartitioner,
    LabelSkewPartitioner,
    NaturalPartitioner,
    PathologicalPartitioner,
    QuantitySkewPartitioner,
    describe,
)
from fedlightning.datamodules.plans import cut
from fedlightning.datamodules.skew import raise_to_minimum

LABELS = np.repeat(np.arange(10), [90, 110, 100, 80, 120, 95, 105, 100, 130, 70])[
    np.random.default_rng(0).permutation(1000)
]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def split(partitioner, labels=LABELS, seed=0):
    return partitioner.plan(labels, generator(seed)).split(labels, generator(seed + 1))


def histogram(parts, labels=LABELS):
    return describe(parts, labels).counts


def complete(parts, size):
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(size))


ALL = [
    IIDPartitioner(7),
    IIDPartitioner(7, stratified=False),
    PathologicalPartitioner(10),
    PathologicalPartitioner(7, 3, "shards"),
    DirichletPartitioner(9, 0.1),
    DirichletPartitioner(9, 0.1, balance=True),
    DirichletPartitioner(9, 0.5, by="client"),
    LabelSkewPartitioner(9, 0.3),
    QuantitySkewPartitioner(9, 0.3),
    QuantitySkewPartitioner(9, 0.3, stratified=False),
    LabelQuantitySkewPartitioner(9, 0.3),
]


@pytest.mark.parametrize("partitioner", ALL, ids=lambda p: f"{type(p).__name__}{vars(p)}")
def test_every_partition_is_complete_deterministic_and_shared_by_splits(partitioner):
    plan = partitioner.plan(LABELS, generator())
    parts = plan.split(LABELS, generator(1))
    assert complete(parts, 1000)
    assert plan.client_ids == [str(i) for i in range(partitioner.num_clients)]
    again = partitioner.plan(LABELS, generator()).split(LABELS, generator(1))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    # A test set with half of the samples of every class: each client gets half of each of its classes.
    half = np.repeat(np.arange(10), np.bincount(LABELS) // 2)
    tests = plan.split(half, generator(2))
    assert complete(tests, len(half))
    if partitioner.needs == "labels":
        assert np.abs(histogram(parts) / 2 - histogram(tests, half)).max() < 1.5
    sizes = np.array([len(part) for part in parts]) / 2
    assert np.abs(sizes - [len(part) for part in tests]).max() <= 1


@pytest.mark.parametrize("partitioner", ALL, ids=lambda p: f"{type(p).__name__}{vars(p)}")
def test_another_seed_is_another_partition(partitioner):
    assert any(not np.array_equal(a, b) for a, b in zip(split(partitioner), split(partitioner, seed=5), strict=True))


def test_empty_splits_and_unknown_classes():
    plan = DirichletPartitioner(4, 0.5).plan(np.repeat([0, 1], 50), generator())
    assert [len(part) for part in plan.split(np.zeros(0, int))] == [0, 0, 0, 0]
    parts = plan.split(np.full(200, 7), generator())  # a class that training never saw goes by client size
    assert np.allclose([len(part) / 200 for part in parts], plan.sizes, atol=0.01)


@given(st.integers(1, 12), st.integers(12, 120), st.integers(1, 6), st.integers(0, 999))
def test_iid_deals_evenly(clients, size, classes, seed):
    labels = np.random.default_rng(seed).integers(0, classes, size)
    counts = histogram(split(IIDPartitioner(clients), labels, seed), labels)
    assert np.ptp(counts.sum(axis=1)) <= 1
    assert np.ptp(counts, axis=0).max() <= 1
    random = [len(part) for part in split(IIDPartitioner(clients, stratified=False), labels, seed)]
    assert max(random) - min(random) <= 1


def test_partitioners_without_labels_take_a_number():
    for partitioner in (IIDPartitioner(3, stratified=False), QuantitySkewPartitioner(3, stratified=False)):
        assert complete(partitioner.plan(100, generator()).split(100, generator()), 100)
    with pytest.raises(ValueError, match="pass labels"):
        IIDPartitioner(3).plan(100, generator())


@pytest.mark.parametrize("clients", [5, 6, 10, 30])
def test_pathological_classes(clients):
    for seed in range(20):
        counts = histogram(split(PathologicalPartitioner(clients), seed=seed))
        assert ((counts > 0).sum(axis=1) == 2).all()
        assert (counts.sum(axis=0) == np.bincount(LABELS)).all()
        for column in counts.T:  # the holders of a class share it evenly
            assert np.ptp(column[column > 0]) <= 1


def test_pathological_shards():
    labels = np.repeat(np.arange(10), 60)
    counts = histogram(split(PathologicalPartitioner(15, 2, "shards"), labels), labels)
    assert (counts.sum(axis=1) == 40).all()
    assert (counts > 0).sum(axis=1).max() <= 4 and (counts % 20 == 0).all()
    uneven = histogram(split(PathologicalPartitioner(20, 2, "shards")))
    assert (uneven.sum(axis=1) == 50).all() and (uneven > 0).sum(axis=1).max() <= 4


def test_dirichlet_limits():
    share = np.bincount(LABELS) / 1000
    for by in ("class", "client"):
        even = histogram(split(DirichletPartitioner(10, 1e6, by=by, min_samples=0)))
        noise = 2 if by == "class" else 12  # by class: shares are equal; by client: 100 draws each
        assert np.abs(even - 100 * share).max() <= noise
    owners = histogram(split(DirichletPartitioner(10, 1e-3, min_samples=0)))
    assert (owners.max(axis=0) / owners.sum(axis=0)).mean() > 0.95
    # By client, a class that runs out forces leftovers on those who wanted it: exact only where that is not so.
    two = np.repeat([0, 1], 500)
    assert all((np.sort(histogram(split(DirichletPartitioner(2, 1e-3, by="client"), two, s), two)) == [0, 500]).all()
               for s in range(10))  # fmt: skip


def test_dirichlet_by_client_gives_equal_sizes_and_less_pure_clients_with_alpha():
    def purity(alpha):
        counts = [histogram(split(DirichletPartitioner(10, alpha, by="client"), seed=s)) for s in range(10)]
        assert all((table.sum(axis=1) == 100).all() for table in counts)
        return np.mean([table.max(axis=1) / 100 for table in counts])

    assert purity(0.1) > purity(1.0) > purity(100.0)
    assert purity(1e-3) > 0.6


def test_dirichlet_mean_share():
    clients, draws = 5, 300
    shares = np.stack(
        [DirichletPartitioner(clients, 0.5, min_samples=0).plan(LABELS, generator(s)).shares for s in range(draws)]
    )
    # Var of a Dirichlet share = (1/N)(1 - 1/N) / (N alpha + 1)
    sigma = np.sqrt((1 / clients) * (1 - 1 / clients) / (clients * 0.5 + 1) / draws)
    assert np.abs(shares.mean(axis=0) - 1 / clients).max() < 5 * sigma


@pytest.mark.parametrize("balance", [False, True])
def test_dirichlet_minimum_is_honoured_without_a_loop(balance):
    for seed in range(5):
        # 40 clients of at least 24 of 1000 samples: no draw will do, so the repair must.
        parts = split(DirichletPartitioner(40, 0.01, min_samples=24, balance=balance), seed=seed)
        assert min(len(part) for part in parts) >= 24 and complete(parts, 1000)
    assert min(len(part) for part in split(DirichletPartitioner(10, 0.05))) >= 10


def test_balance_limits_sizes():
    free = np.mean([np.std([len(p) for p in split(DirichletPartitioner(10, 0.5), seed=s)]) for s in range(10)])
    bound = np.mean(
        [np.std([len(p) for p in split(DirichletPartitioner(10, 0.5, balance=True), seed=s)]) for s in range(10)]
    )
    assert bound < free


def test_raise_to_minimum_moves_single_samples():
    table = raise_to_minimum(np.array([[9, 0], [0, 0], [1, 6]]), 3)
    assert table.sum(axis=0).tolist() == [10, 6] and table.sum(axis=1).min() == 3


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
def test_label_skew_has_equal_sizes(alpha):
    for seed in range(4):
        counts = histogram(split(LabelSkewPartitioner(8, alpha), seed=seed))
        assert (counts.sum(axis=1) == 125).all()
        assert (counts.sum(axis=0) == np.bincount(LABELS)).all()
    odd = histogram(split(LabelSkewPartitioner(7, alpha)))
    assert np.ptp(odd.sum(axis=1)) <= 1


def test_label_skew_grows_with_small_alpha():
    def distance(alpha):
        return np.mean(
            [describe(split(LabelSkewPartitioner(10, alpha), seed=s), LABELS).mean_total_variation for s in range(5)]
        )

    assert distance(0.1) > distance(1.0) > distance(10.0) > distance(1000.0)
    assert distance(1000.0) < 0.05


def test_quantity_skew_keeps_the_class_mix():
    def gini(alpha):
        values = []
        for seed in range(20):
            sizes = np.sort([len(p) for p in split(QuantitySkewPartitioner(10, alpha, min_samples=1), seed=seed)])
            values.append((2 * np.arange(1, 11) - 11) @ sizes / (10 * sizes.sum()))
        return np.mean(values)

    report = describe(split(QuantitySkewPartitioner(10, 1.0, min_samples=30)), LABELS)
    assert report.min_size >= 30 and report.counts.sum() == 1000
    assert report.mean_total_variation < 0.06  # rounding of at least 30 samples over 10 classes
    expected = np.outer(report.sizes, np.bincount(LABELS)) / 1000
    assert np.abs(report.counts - expected).max() < 1
    assert gini(0.1) > gini(1.0) > gini(10.0)


def test_label_and_quantity_skew_has_both_margins():
    sizes = [len(part) for part in split(QuantitySkewPartitioner(10, 1.0))]
    both = describe(split(LabelQuantitySkewPartitioner(10, 1.0)), LABELS)
    assert both.sizes.tolist() == sizes  # the same draw of sizes, with other labels
    assert both.counts.sum(axis=0).tolist() == np.bincount(LABELS).tolist()
    assert both.mean_total_variation > 0.2


def test_natural_groups():
    groups = np.array(["b", "a", "b", "c", "a", "b"])
    plan = NaturalPartitioner().plan(groups, generator())
    assert plan.client_ids == ["a", "b", "c"]
    assert [part.tolist() for part in plan.split(groups)] == [[1, 4], [0, 2, 5], [3]]
    assert [part.tolist() for part in plan.split(np.array(["c", "c"]))] == [[], [], [0, 1]]
    with pytest.raises(ValueError, match=r"groups \['z'\] have no training samples"):
        plan.split(np.array(["a", "z"]))
    numbers = NaturalPartitioner().plan(np.array([10, 9, 10]), generator())
    assert numbers.client_ids == ["9", "10"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: IIDPartitioner(0), r"IIDPartitioner got num_clients=0\. Use a whole number in \[1, inf\)"),
        (lambda: IIDPartitioner(2.5), "num_clients=2.5"),
        (lambda: DirichletPartitioner(3, 0.0), "alpha=0.0"),
        (lambda: DirichletPartitioner(3, float("nan")), "alpha=nan"),
        (lambda: DirichletPartitioner(3, by="row"), "by='row'"),
        (lambda: DirichletPartitioner(3, by="client", balance=True), "balance=True"),
        (lambda: DirichletPartitioner(3, min_samples=-1), "min_samples=-1"),
        (lambda: PathologicalPartitioner(3, 0), "classes_per_client=0"),
        (lambda: PathologicalPartitioner(3, scheme="x"), "scheme='x'"),
        (lambda: LabelQuantitySkewPartitioner(3, 1.0, alpha_size=-1.0), "alpha_size=-1.0"),
        (lambda: split(IIDPartitioner(1001)), "use num_clients <= 1000"),
        (lambda: split(PathologicalPartitioner(30, 11)), "use classes_per_client <= 10"),
        (lambda: split(PathologicalPartitioner(4, 2)), "use classes_per_client >= 3"),
        (lambda: split(PathologicalPartitioner(900, 2)), "fewer samples than holders"),
        (lambda: split(PathologicalPartitioner(600, 2, "shards")), "cannot cut 1000 samples"),
        (lambda: split(DirichletPartitioner(10, 0.5, min_samples=101)), "use min_samples <= 100"),
        (lambda: split(IIDPartitioner(3), np.zeros((10, 2))), r"got shape \(10, 2\)"),
        (lambda: split(LabelSkewPartitioner(10, 0.01, max_iterations=1)), "larger alpha"),
        (lambda: NaturalPartitioner().plan(5, generator()), "not their number"),
        (lambda: NaturalPartitioner().plan(np.zeros(0), generator()), "no samples"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@given(st.integers(0, 60), st.floats(0, 0.95), st.integers(0, 99))
@example(2, 0.95, 0)
def test_cut_is_disjoint_complete_and_sized(size, fraction, seed):
    indices = np.random.default_rng(seed).permutation(200)[:size]
    labels = np.random.default_rng(seed).integers(0, 3, 200)
    rest, part = cut(indices, fraction, generator(seed), labels)
    assert sorted([*rest, *part]) == sorted(indices)
    if size > 1 and fraction > 0:
        assert len(part) == min(size - 1, max(1, round(fraction * size)))
        expected = np.bincount(labels[indices], minlength=3) * len(part) / size
        assert np.abs(np.bincount(labels[part], minlength=3) - expected).max() < 1
    else:
        assert len(part) == 0
    assert np.array_equal(cut(indices, fraction, generator(seed), labels)[1], part)
