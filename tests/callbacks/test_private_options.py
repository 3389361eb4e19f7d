"""What ClientDP and SampleDP have in common: secrets, covers, and what is said of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedlightning.callbacks import ClientDP, SampleDP

KINDS = [ClientDP, SampleDP]


def made(kind, **options):
    return kind(**{"delta": 1e-3, "noise_multiplier": 1.0} | options)


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_of_the_operating_system_unless_a_seed_is_given(kind):
    found = {made(kind).new_secret("0") for _ in range(20)}
    assert len(found) == 20 and all(len(one) == 32 for one in found)
    seeded = made(kind, noise_seed=3)
    assert seeded.new_secret("0") == seeded.new_secret("0") != seeded.new_secret("1")
    assert "not private" in seeded.known_noise


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scores", ["withheld", "in the clear"])
def test_scores_are_covered_as_asked_and_logged_values_and_the_rest_by_their_kind(kind, scores):
    private = made(kind, scores=scores)
    items = {
        name: SimpleNamespace(kind=name, owner="") for name in ("entries", "scores", "logged", "counts", "classes")
    }
    found = {name: private.covers(item) for name, item in items.items()}
    withheld = {"scores": scores, "logged": scores if kind is ClientDP else "withheld", "classes": "withheld"}
    assert found == {"entries": "noised", "counts": "in the clear"} | withheld
    assert private.covers(SimpleNamespace(kind="extras", owner="mine")) == "in the clear"


def test_every_item_that_leaves_is_told_under_its_cover():
    private = made(SampleDP)
    texts = {"entries": [], "logged": [], "counts": []}

    class Item(SimpleNamespace):
        def __str__(self):
            return self.kind

    server = SimpleNamespace(
        outgoing=[Item(kind=name, owner="") for name in texts], blueprint=SimpleNamespace(privacy={})
    )
    told = private.items_told(server)
    assert told.pop("against").startswith("all but the client (")
    assert told == {"noised": ["entries"], "withheld": ["logged"], "in_the_clear": ["counts"]}
