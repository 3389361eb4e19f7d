"""Who belongs to which cluster: the table, and pictures that show what it says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from matplotlib import colormaps

from fedlightning.callbacks.shared.memberships import (
    COLUMNS,
    draw_memberships,
    in_client_order,
    ledger_figure,
    memberships_figure,
    note_memberships,
    read_memberships,
    save,
)

ODD = ["a$\\b$", "_x", "ü, ü/é", "", 'q"1', "two\nlines"]


def server(folder, number=0, clients=("a", "b")):
    return SimpleNamespace(run_dir=folder, round=number, clients=list(clients))


def test_rows_of_the_present_round_and_later_ones_are_written_anew(tmp_path):
    for number, cluster in enumerate(["one", "two", "two"]):
        note_memberships(server(tmp_path, number), {"a": {cluster: 0.7, "other": 0.3, "none": 0.0}})
    note_memberships(server(tmp_path, 1), {"b": {"one": 1.0}})
    rows = [tuple(row.values()) for row in read_memberships(tmp_path / "clusters.csv")]
    assert rows == [(1, "a", "one", 0.7), (1, "a", "other", 0.3), (2, "b", "one", 1.0)]
    assert (tmp_path / "clusters.csv").read_text().startswith(",".join(COLUMNS))


@pytest.mark.parametrize("client", ["b", *ODD])
@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_rounds_are_appended_and_a_line_that_was_cut_off_goes(tmp_path, client, cut):
    path = tmp_path / "clusters.csv"
    for number in range(2):
        note_memberships(server(tmp_path, number), {"a": {"one": 1.0}, client: {"two": 0.25}})
    first = path.stat().st_ino
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) - cut])
    read_memberships(path)
    note_memberships(server(tmp_path, 2 if cut == 0 else 1), {client: {"one": 0.5}})
    rows = [tuple(row.values()) for row in read_memberships(path)]
    kept = [(1, "a", "one", 1.0), (1, client, "two", 0.25)]
    if cut == 0:
        kept += [(2, "a", "one", 1.0), (2, client, "two", 0.25)]
    assert rows == [*kept, (3 if cut == 0 else 2, client, "one", 0.5)]
    assert (path.stat().st_ino == first) or cut or "\n" in client  # what was there has not been written again


def test_without_a_folder_nothing_is_written(tmp_path):
    note_memberships(server(None), {"a": {"one": 1.0}})
    draw_memberships(server(None))
    draw_memberships(server(tmp_path))
    assert not list(tmp_path.iterdir()) and read_memberships(tmp_path / "clusters.csv") == []


def test_state_is_in_the_order_of_the_clients():
    assert list(in_client_order(server(None, clients="abc"), {"c": 1, "x": 2, "a": 3})) == ["a", "c"]


def test_the_picture_has_the_colour_of_the_largest_share():
    rows = [
        {"round": 1, "client": "a", "cluster": "one", "share": 0.25},
        {"round": 1, "client": "a", "cluster": "two", "share": 0.75},
        {"round": 2, "client": "b", "cluster": "one", "share": 1.0},
    ]
    axis = memberships_figure(rows).axes[0]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["b", "a"]  # cluster one first
    image = axis.images[0].get_array()
    one, two = (colormaps["tab10"](k)[:3] for k in (0, 1))
    assert image.shape == (2, 2, 3)
    assert tuple(image[0, 1]) == pytest.approx(one)
    assert tuple(image[1, 0]) == pytest.approx(tuple(1 - 0.75 * (1 - c) for c in two))
    assert (image[0, 0] == 1).all() and (image[1, 1] == 1).all()  # had not taken part


def test_balances_add_up():
    entry = {"client": "a", "paid": 1.0, "refunded": 0.25, "rewarded": 0.5}
    lines = ledger_figure([entry | {"round": 1}, entry | {"round": 3}], {"a": 4.0, "b": 4.0}).axes[0].lines
    assert lines[0].get_ydata().tolist() == [4.0, 3.75, 3.75, 3.5]
    assert lines[1].get_ydata().tolist() == [4.0] * 4


def test_clients_of_any_name_are_drawn_by_it(tmp_path):
    note_memberships(server(tmp_path), {client: {"one": 1.0} for client in ODD})
    rows = read_memberships(tmp_path / "clusters.csv")
    assert [row["client"] for row in rows] == ODD
    shown = memberships_figure(rows)
    entries = [{"round": 1, "client": c, "paid": 1.0, "refunded": 0.0, "rewarded": 0.5} for c in ODD]
    balances = ledger_figure(entries, dict.fromkeys(ODD, 2.0))
    for number, figure in enumerate([shown, balances]):
        save(figure, tmp_path / "figures" / f"{number}.png")  # Matplotlib takes "$...$" for mathematics
    assert [text.get_text() for text in shown.axes[0].get_yticklabels()] == sorted(ODD)
    assert [text.get_text() for text in balances.legends[0].get_texts()] == ODD


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


def test_equal_balances_can_all_be_seen():
    entries = [{"round": 1, "client": one, "paid": 1.0, "refunded": 0.0, "rewarded": 0.5} for one in ("a", "b", "c")]
    lines = ledger_figure(entries, {"a": 10.0, "b": 10.0, "c": 10.0}).axes[0].lines
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(set(widths), reverse=True)  # what is drawn later is thinner
