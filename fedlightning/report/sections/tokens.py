"""Section about tokens: what clients paid and earned, and who profits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedlightning.report.cells import Column, Missing, counted, is_number, number
from fedlightning.report.context import METHOD, SEEDS, Context, Row
from fedlightning.report.drawing import count_along_x, legend_below, panel
from fedlightning.report.figures.client_maps import MAX_NAMED_CLIENTS
from fedlightning.report.figures.partition_bars import CLASSES, colour_of
from fedlightning.report.html import Gallery, Picture, Section, Table
from fedlightning.report.styles import INK, LINES, MUTED, Style, short_names
from fedlightning.study.token_tables import balances, by_seed


def balance_lines(balances: Mapping[str, Sequence[float]], style: Style) -> Figure:
    """Draw a line for each client: how many tokens more than at the start it has after each round."""
    figure, axes = panel()
    axes.axhline(0, color=INK, linewidth=1)
    names = short_names(balances, 12)
    named = len(balances) <= len(CLASSES)
    labels = _labels(balances, names)
    for index, (client, balance) in enumerate(balances.items()):
        if named and client not in labels:
            continue
        colour = to_hex(colour_of(index, len(balances))) if named else style.colour
        line, width = (LINES[index % 3], 1.5) if named else ("-", 0.9)
        axes.plot(range(len(balance)), balance, color=colour, linestyle=line, linewidth=width, alpha=1 if named else 0.5,
                  label=labels.get(client))  # fmt: skip
    count_along_x(axes)
    axes.set_xlabel("round")
    axes.set_ylabel("tokens won or lost since the start")
    if named:
        legend_below(figure, axes, columns=5)
    return figure


def _labels(balances: Mapping[str, Sequence[float]], names: Mapping[str, str]) -> dict[str, str]:
    """Return the label of each line; clients whose lines are equal share that of the first of them.

    Example:
        >>> _labels({"a": [0, 1], "b": [0, 2], "c": [0, 1]}, {"a": "a", "b": "b", "c": "c"})
        {'a': 'a, c', 'b': 'b'}
    """
    clients_by_line: dict[tuple[float, ...], list[str]] = {}
    for client, balance in balances.items():
        clients_by_line.setdefault(tuple(round(float(value), 9) for value in balance), []).append(client)
    return {same[0]: ", ".join(names[client] for client in same) for same in clients_by_line.values()}


@dataclass(frozen=True)
class Profit:
    """What a client gives and gets.

    Attributes:
        client: The client.
        contribution: Its mean contribution.
        error: Standard error of that, or `None`.
        gain: Its gain in the score.
        balance: Tokens that it has won or lost.
    """

    client: str
    contribution: float
    error: float | None
    gain: float
    balance: float


def profit_plot(clients: Sequence[Profit], style: Style, ylabel: str) -> Figure:
    """Draw a marker for each client: contribution against gain; filled if it won tokens, hollow if it did not."""
    figure, axes = panel()
    axes.axhline(0, color=INK, linewidth=1)
    axes.axvline(0, color=INK, linewidth=1)
    names = short_names([client.client for client in clients], 10)
    for client in clients:
        if client.error is not None and len(clients) <= MAX_NAMED_CLIENTS:
            ends = [client.contribution - client.error, client.contribution + client.error]
            axes.plot(ends, [client.gain] * 2, color=MUTED, linewidth=0.8, alpha=0.6)
        fill = style.colour if client.balance > 0 else "white"
        size = 7 if len(clients) <= MAX_NAMED_CLIENTS else 4
        axes.plot([client.contribution], [client.gain], marker=style.marker, color=style.colour, markerfacecolor=fill,
                  markersize=size, markeredgewidth=1.3)  # fmt: skip
    if len(clients) <= MAX_NAMED_CLIENTS:
        for place, some in _same_places(clients).items():
            text = ", ".join(names[client] for client in some)
            axes.annotate(text, place, xytext=(5, 5), textcoords="offset points", fontsize=9)
    axes.set_xlabel(
        "mean contribution (± its standard error)" if len(clients) <= MAX_NAMED_CLIENTS else "mean contribution"
    )
    axes.set_ylabel(ylabel)
    axes.margins(0.08)
    handles = [
        Line2D([], [], color=style.colour, marker=style.marker, linestyle="", markerfacecolor=fill, label=label)
        for fill, label in ((style.colour, "won tokens"), ("white", "won none"))
    ]
    figure.set_figheight(figure.get_figheight() + 0.24)
    figure.legend(handles=handles, loc="outside lower left", ncols=2, handletextpad=0.3)
    return figure


def _same_places(clients: Sequence[Profit]) -> dict[tuple[float, float], list[str]]:
    """Return the clients at each place, so that names at one place stand beside each other."""
    clients_by_place: dict[tuple[float, float], list[str]] = {}
    for client in clients:
        clients_by_place.setdefault((client.contribution, client.gain), []).append(client.client)
    return clients_by_place


def tokens(context: Context) -> Section | None:
    """Show balances over rounds, every client's account, and contribution against gain."""
    totals = context.sort_rows(context.study.ledgers())
    if not totals:
        return None
    rows = context.study.tokens()
    return context.section(
        "tokens",
        "Who pays, who earns, who profits",
        "Tokens",
        [_totals(context, totals), _accounts(context, totals, rows)],
        "Clients pay tokens to take part, get some back where the model did not improve, and earn the rest by what they "
        "contribute.",
    )


def _totals(context: Context, totals: Sequence[Row]) -> Table:
    rows = [
        dict(row) | {"won": f"{row['earners']} of {row['clients']}"}
        | ({"gained": f"{row['gainers']} of {row['compared']}"} if row["compared"] else {})
        for row in totals
    ]  # fmt: skip
    columns = [
        METHOD,
        *(Column(name, name, "amount", group="tokens of all clients") for name in ("paid", "refunded", "rewarded")),
        Column("won", "won tokens", "text", group="clients that"),
        Column("gained", "gain over FedAvg", "text", group="clients that"),
        Column("contribution_gain", "contribution, gain", "difference", decimals=2, group="rank correlation of"),
        Column("contribution_balance", "contribution, balance", "difference", decimals=2, group="rank correlation of"),
        Column("balance_gain", "balance, gain", "difference", decimals=2, group="rank correlation of"),
        SEEDS,
    ]
    notes = [
        f"{row['method']}: in every round and cluster, paid = refunded + rewarded."
        if row["conserved"]
        else f"{row['method']}: tokens were made or lost, up to {row['missing']:.3g} in a round of a cluster."
        for row in totals
    ]
    notes.append("Rank correlation: Spearman’s ρ over clients; +1: who contributes most profits most, −1: least.")
    if not any(row["compared"] for row in totals):
        notes.append("Gains are empty: they need a FedAvg run on the same splits, seeds and rounds.")
    return context.table("ledgers", "Tokens, and whether contributing pays", columns, rows, notes, _missing(context))


def _accounts(context: Context, totals: Sequence[Row], rows: Sequence[Row]) -> Gallery | None:
    pictures: list[Picture] = []
    for total in totals:
        method_rows = [row for row in rows if row["method"] == total["method"]]
        pictures += [_balances(context, total, method_rows), *_profits(context, total, method_rows)]
    columns = [
        *([METHOD] if len(totals) > 1 else []),
        Column("client", "client", "text"),
        *(Column(name, name, decimals=2, group="tokens") for name in ("paid", "refunded", "rewarded")),
        Column("balance", "balance", "difference", decimals=2, group="tokens", help="refunded + rewarded − paid"),
        counted("rounds", "rounds", rows, help="in which it trained"),
        Column("contribution", "mean", "difference", decimals=4, radius="contribution_se", group="contribution",
               help="over the rounds and clusters in which it trained, ± standard error of this mean"),
        *_sampled(rows),
        Column("pma", "gain over FedAvg", "difference", help=f"{context.over('FedAvg')} (PMA), mean over seeds"),
    ]  # fmt: skip
    several = len(context.study.data.seeds) > 1
    whose = "" if len(totals) > 1 else f" with {totals[0]['method']}"
    caption = f"What each client paid, earned, contributed and gained{whose}" + (
        ", means over seeds" if several else ""
    )
    notes = [
        "± is the standard error of a mean over rounds; the contributions of a round are those of who trained in it."
    ]
    table = context.table("tokens", caption, columns, rows, notes, _missing(context))
    reading = "Balances are counted from the start of the run."
    if any(len([row for row in rows if row["method"] == total["method"]]) > len(CLASSES) for total in totals):
        reading += f" More than {len(CLASSES)} clients are not named."
    if several:
        reading += " Pictures of balances are of the first seed; the rest are means over seeds."
    return context.gallery(pictures, table, reading, open=len(rows) <= MAX_NAMED_CLIENTS)


def _balances(context: Context, total: Row, rows: Sequence[Row]) -> Picture:
    method = total["method"]
    seed, entries = next(iter(by_seed(context.study.data, method).items()))
    lines = balances(entries, [row["client"] for row in rows])
    ends = sorted(((balance[-1], client) for client, balance in lines.items()), reverse=True)
    (most, winner), (least, loser) = ends[0], ends[-1]
    return context.picture(
        f"balances-{context.slugs[method]}",
        f"{method}: tokens over rounds" + (f", seed {seed}" if len(context.study.data.seeds) > 1 else ""),
        f"Lines: tokens of each of {len(lines)} clients since the start; at the end client {winner} has "
        f"{number(most, 2, sign=True)}, client {loser} {number(least, 2, sign=True)}.",
        partial(balance_lines, lines, context.styles[method]),
    )


def _profits(context: Context, total: Row, rows: Sequence[Row]) -> list[Picture]:
    """Return the picture of contribution against gain, if both are known of two clients or more."""
    profits = [
        Profit(row["client"], row["contribution"], row["contribution_se"], row["pma"], row["balance"])
        for row in rows
        if is_number(row["contribution"]) and is_number(row["pma"])
    ]
    if len(profits) < 2:
        return []
    method, rho = total["method"], total["contribution_gain"]
    correlation = "" if rho is None else f"; rank correlation {number(rho, 2, sign=True)}"
    return [
        context.picture(
            f"profits-{context.slugs[method]}",
            f"{method}: who profits",
            f"Marks: mean contribution and gain over FedAvg of {len(profits)} clients; {total['gainers']} gain{correlation}.",
            partial(profit_plot, profits, context.styles[method], context.over("FedAvg")),
        )
    ]


def _sampled(rows: Sequence[Row]) -> list[Column]:
    """Return the column of the errors of sampling, if any contribution was sampled."""
    if not any(row["sampling_error"] for row in rows):
        return []
    return [Column("sampling_error", "sampling", decimals=4, group="contribution",
                   help="standard error of the mean from sampling coalitions, at most")]  # fmt: skip


def _missing(context: Context) -> Missing:
    """Return the function that says why a gain is empty; a client that never trained has no contribution."""
    return lambda row, column: context.missing(row, column) if column.key == "pma" else None
