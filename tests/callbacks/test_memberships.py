"""Who belongs to which cluster: the table and its picture."""

from __future__ import annotations

import numpy as np
import pytest

from fedlightning.callbacks.shared.memberships import ledger_figure, memberships_figure


def rows(of, rounds=1):
    return [
        {"round": number, "client": client, "cluster": cluster, "share": share}
        for number in range(1, rounds + 1)
        for client, cluster, share in of
    ]


def labels(axis):
    return [label.get_text() for label in axis.get_yticklabels()]


def test_clients_and_clusters_stand_in_the_order_of_their_numbers():
    figure = memberships_figure(rows([(c, "centre 2", 1.0) for c in ("10", "2", "1")] + [("0", "centre 10", 1.0)]))
    assert labels(figure.axes[0]) == ["1", "2", "10", "0"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["centre 2", "centre 10"]


@pytest.mark.parametrize("rounds", [1, 3, 15])
def test_rounds_are_whole_numbers(rounds):
    entry = {"round": rounds, "client": "a", "paid": 1.0, "refunded": 0.0, "rewarded": 0.0}
    for figure in (memberships_figure(rows([("a", "one", 1.0)], rounds)), ledger_figure([entry], {"a": 2.0})):
        axis = figure.axes[0]
        low, high = axis.get_xlim()
        ticks = [tick for tick in axis.get_xticks() if low <= tick <= high]
        assert ticks and all(tick == round(tick) for tick in ticks)


def test_twenty_clients_have_twenty_colours():
    entry = {"round": 1, "client": "0", "paid": 1.0, "refunded": 0.0, "rewarded": 0.0}
    lines = ledger_figure([entry], {str(i): 2.0 for i in range(20)}).axes[0].lines
    assert len({line.get_color() for line in lines}) == 20


def test_the_strongest_cluster_colours_a_client_the_paler_the_smaller_its_share():
    figure = memberships_figure(rows([("a", "one", 0.7), ("a", "two", 0.3), ("b", "one", 1.0)]))
    image = np.asarray(figure.axes[0].images[0].get_array())
    full = image[labels(figure.axes[0]).index("b"), 0]
    np.testing.assert_allclose(image[0, 0], 1 - 0.7 * (1 - full))


def test_balances_follow_the_entries():
    entries = [{"round": r, "client": "a", "paid": 1.0, "refunded": 0.25, "rewarded": 0.5} for r in (1, 3)]
    lines = ledger_figure(entries, {"a": 4.0, "b": 4.0}).axes[0].lines
    assert [line.get_ydata().tolist() for line in lines] == [[4.0, 3.75, 3.75, 3.5], [4.0] * 4]
