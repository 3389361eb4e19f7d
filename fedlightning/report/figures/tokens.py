"""Figures of tokens: what each client has won and lost over rounds, and who profits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedlightning.report.drawing import legend_below, panel
from fedlightning.report.figures.clients import MANY
from fedlightning.report.figures.partition import CLASSES, colour_of
from fedlightning.report.styles import INK, LINES, MUTED, Style, short_names


def balance_lines(balances: Mapping[str, Sequence[float]], style: Style) -> Figure:
    """Draw a line for each client: how many tokens more than at the start it has after each round."""
    figure, axes = panel()
    axes.axhline(0, color=INK, linewidth=1)
    names = short_names(balances, 12)
    named = len(balances) <= len(CLASSES)
    labels = _labels(balances, names)
    for index, (client, of) in enumerate(balances.items()):
        if named and client not in labels:
            continue
        colour = to_hex(colour_of(index, len(balances))) if named else style.colour
        line, width = (LINES[index % 3], 1.5) if named else ("-", 0.9)
        axes.plot(range(len(of)), of, color=colour, linestyle=line, linewidth=width, alpha=1 if named else 0.5,
                  label=labels.get(client))  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
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
    found: dict[tuple[float, ...], list[str]] = {}
    for client, of in balances.items():
        found.setdefault(tuple(round(float(value), 9) for value in of), []).append(client)
    return {same[0]: ", ".join(names[client] for client in same) for same in found.values()}


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
    names = short_names([one.client for one in clients], 10)
    for one in clients:
        if one.error is not None and len(clients) <= MANY:
            ends = [one.contribution - one.error, one.contribution + one.error]
            axes.plot(ends, [one.gain] * 2, color=MUTED, linewidth=0.8, alpha=0.6)
        fill = style.colour if one.balance > 0 else "white"
        size = 7 if len(clients) <= MANY else 4
        axes.plot([one.contribution], [one.gain], marker=style.marker, color=style.colour, markerfacecolor=fill,
                  markersize=size, markeredgewidth=1.3)  # fmt: skip
    if len(clients) <= MANY:
        for place, some in _same_places(clients).items():
            text = ", ".join(names[client] for client in some)
            axes.annotate(text, place, xytext=(5, 5), textcoords="offset points", fontsize=9)
    axes.set_xlabel("mean contribution (± its standard error)" if len(clients) <= MANY else "mean contribution")
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
    found: dict[tuple[float, float], list[str]] = {}
    for one in clients:
        found.setdefault((one.contribution, one.gain), []).append(one.client)
    return found
