"""What a visit adds up of its fits."""

from __future__ import annotations

from types import SimpleNamespace

from fedlightning.client.record import VisitWork


def fitted(steps, attempts, contributed=True, **sums):
    return SimpleNamespace(
        steps=steps, attempts=attempts, contributed=contributed, lr_sums=sums, gradient_weights=sums, unseen=""
    )


def test_federated_fits_count_and_the_others_are_apart():
    work = VisitWork()
    assert work.contributed is None and work.lr_sum == 0.0
    work.add(fitted(4, 5, a=1.0), federated=False)
    assert work == VisitWork(own_steps=4)
    work.add(fitted(0, 2, contributed=False), federated=True)
    assert work.contributed is False
    work.add(fitted(2, 2, a=0.5, b=1.5), federated=True)
    work.add(fitted(1, 2, contributed=False, a=2.0), federated=True)
    assert (work.contributed, work.steps, work.skipped, work.own_steps) == (True, 3, 3, 4)
    assert work.lr_sums == work.gradient_weights == {"a": 2.5, "b": 1.5} and work.lr_sum == 2.5
