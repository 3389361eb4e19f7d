"""Every pair of algorithms of the catalogue gives one result in both orders, or is refused in a sentence in both.

Pairs that meet in a hook run always; all pairs are slow tests.
"""

from __future__ import annotations

import pytest

from fedlightning.callbacks import FedPer, FedProx
from fedlightning.catalogue import ALGORITHMS, create
from fedlightning.contract import FederatedCallback
from fedlightning.testing.pairs import check_both_act, check_pair

GIVEN = {
    "FENDA": {"head": "head"},
    "FCCL": {"head": "head", "pretrain_epochs": 1},
    "FCCLPlus": {"head": "head"},
    "FedGH": {"head": "head"},
    "FedGKT": {"head": "head", "server_hidden": [4]},
    "PerFCL": {"head": "head"},
    "PLayerFL": {"split": 2},
    "PIFL": {"monitor": "val_loss"},
    "FedCovid": {"head": "head"},
    "FedMultimodal": {"encoders": {"x": ["body"]}},
    "Harmony": {"encoders": {"x": []}, "stage1": 1.0},
    "pFedKnow": {"head": "head", "threshold": 0.0},
    "TIFF": {"monitor": "val_loss"},
}
"""Options without which the toy module cannot be trained."""
PARTIAL = {"HeteroFL", "FedRolex", "FederatedDropout", "FjORD", "pFedHR"}
"""Methods that take chains of layers apart, which the full toy module is none of."""
NAMES = [row.name for row in ALGORITHMS]
ROWS = {row.name: row for row in ALGORITHMS}
MEETING = (
    ("correct_gradient", "correct_gradient"),
    ("correct_gradient", "on_before_optimizer_step"),
    ("on_receive", "on_receive"),
    ("wrap_module", "wrap_module"),
)
"""Pairs of hooks in which what one callback does changes what another one sees."""


def algorithm(name):
    """One of the catalogue, weighted as all others are."""
    weighted = any(option.name == "weighting" for option in ROWS[name].options())
    return create(name, **GIVEN.get(name, {}), **({"weighting": "uniform"} if weighted else {}))


def has_hook(name, hook):
    return getattr(ROWS[name].load(), hook) is not getattr(FederatedCallback, hook)


def is_variant(name):
    """A subclass of another algorithm has its hooks."""
    cls = ROWS[name].load()
    return any(issubclass(cls, ROWS[other].load()) for other in NAMES if other != name)


def options(a, b):
    steps = {"local_steps": 1, "batch_size": 64} if "FedSGD" in (a, b) else {}
    return {"full": not PARTIAL & {a, b}, **({"local_steps": 1} if "DSGD" in (a, b) else {}), **steps}


def check(a, b):
    return check_pair(algorithm(a), algorithm(b), **options(a, b))


LONG = ("correct_gradient-on_before_optimizer_step", "correct_gradient-correct_gradient", "on_receive-on_receive")
"""Hooks at which very many pairs meet."""


@pytest.mark.parametrize(
    "hooks",
    [pytest.param(hooks, marks=pytest.mark.slow if "-".join(hooks) in LONG else ()) for hooks in MEETING],
    ids="-".join,
)
def test_pairs_that_meet_in_a_hook(hooks):
    ours, theirs = ([name for name in NAMES if has_hook(name, hook) and not is_variant(name)] for hook in hooks)
    pairs = {tuple(sorted((a, b))) for a in ours for b in theirs if a != b}
    assert pairs
    for a, b in sorted(pairs):
        check(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("first", NAMES)
def test_all_pairs(first):
    for second in NAMES[NAMES.index(first) + 1 :]:
        check(first, second)


SINGLE = {}
"""Runs of single algorithms, by the options of a pair."""
DECIDED_LATER = {("FedPer", "PLayerFL"), ("FedPer", "PLayerFLRandom")}
"""Whether both keep the head with the clients is decided in round 1, and does not matter to what is trained."""


@pytest.mark.slow
@pytest.mark.parametrize("first", NAMES)
def test_both_of_a_pair_do_something_or_a_sentence_says_that_one_does_not(first):
    for second in NAMES[NAMES.index(first) + 1 :]:
        if (first, second) not in DECIDED_LATER:
            given = options(first, second)
            check_both_act(algorithm(first), algorithm(second), SINGLE.setdefault(str(given), {}), **given)


@pytest.mark.parametrize(("a", "b"), [("HeteroFL", "FedIT"), ("FENDA", "PerFCL")])
def test_modules_that_two_callbacks_change_are_refused_by_name(a, b):
    sentence = check(a, b)
    assert sentence is not None
    assert "Remove one of" in sentence


def test_attention_over_nothing_is_uniform():
    assert check_pair(algorithm("HeurFedAMP"), create("PLayerFL", split=1), full=True) is None  # a frozen entry travels


class Doubles(FedProx):
    """Scales what came before it: its place in the list matters."""

    def correct_gradient(self, ctx, name, parameter, gradient):
        return 2 * gradient


def test_an_order_that_matters_is_found():
    with pytest.raises(
        AssertionError, match=r"order of FedProx and Doubles in the list changes .* Give one of them a rank"
    ):
        check_pair(FedProx(mu=1.0), Doubles())


class Forgets(FedProx):
    """Reads an anchor that is not there."""

    def correct_gradient(self, ctx, name, parameter, gradient):
        return super().correct_gradient(ctx, name, parameter, gradient) if self.works else gradient

    def check(self, setup):
        self.works = not any(isinstance(other, FedPer) for other in setup.callbacks)


def test_one_that_does_nothing_beside_another_is_found():
    with pytest.raises(AssertionError, match=r"^Forgets changes nothing beside FedPer, and nobody says so"):
        check_both_act(FedPer(), Forgets(mu=1.0))
    check_both_act(FedPer(), FedProx(mu=1.0))


class Breaks(FedProx):
    def check(self, setup):
        raise AttributeError("NoneType has no attribute 'x'")


def test_a_raw_error_is_found():
    with pytest.raises(AssertionError, match="not a sentence about them: AttributeError"):
        check_pair(FedProx(), Breaks())
