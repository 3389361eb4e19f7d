"""The sentences at the top of a report, made from the numbers. They claim no more than the numbers support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlightning.report.cells import is_number, number, p_value, pair
from fedlightning.report.context import Context
from fedlightning.report.html import Answer
from fedlightning.study.evidence import no_better_than_constant

ALPHA = 0.05
"""Level of significance."""
FEW_SEEDS = 5
"""Below this many seeds, only large differences can be significant."""
YARDSTICKS = {"siloed": "Siloed training", "central": "Central training, which moves all data,"}
"""Baseline roles that methods are compared with, and that cannot be the best method."""
BEST = "Which method is best on average?"
Row = Mapping[str, Any]


def answers(context: Context) -> list[Answer]:
    """Answer which method is best, whether the difference is real, for whom, and at what cost.

    The list is empty if no method has a number.
    """
    mixed = next((problem.text for problem in context.study.problems if problem.kind == "mixed_scales"), None)
    if mixed is not None:
        return [Answer(BEST, "Cannot be said", mixed)]
    ranked = [row for row in context.overview if _complete(row)]
    methods = [row for row in ranked if row["role"] not in YARDSTICKS] or ranked
    if not methods:
        return []
    first = methods[0]
    alone = len(context.overview) == 1
    best = _alone(context, first) if alone else _best(context, first, ranked)
    if best.method is None:  # nothing was learnt: what differs means nothing
        return [best]
    questions = [best, None if alone else _real(context, first, methods), _whom(context, first, methods)]
    return [answer for answer in (*questions, _price(methods, first)) if answer is not None]


def _complete(row: Row) -> bool:
    """Return True if the mean covers all seeds and the same test data as the other methods. Only such means are ranked."""
    return is_number(row["mean"]) and bool(row["comparable"]) and row["n_seeds"] == row["seeds"]


def _alone(context: Context, only: Row) -> Answer:
    question, constant = "How good is it on average?", no_better_than_constant(context.study.data)
    if constant is not None:
        return Answer(question, f"Not clearly better than {_constant(context)}", constant)
    sentence = f"The mean test {context.metric} of {only['method']} over clients is {_score(only)}."
    return Answer(question, f"{context.metric}: {number(only['mean'])}", sentence, only["method"])


def _constant(context: Context) -> str:
    level = context.study.reference()
    return "chance" if level is None or level.name == "chance" else "a constant answer"


def _best(context: Context, first: Row, ranked: Sequence[Row]) -> Answer:
    constant = no_better_than_constant(context.study.data)
    if constant is not None:
        return Answer(BEST, f"None is clearly better than {_constant(context)}", constant)
    end = "highest" if context.higher else "lowest"
    among = "Among the federated methods, " if any(row["role"] in YARDSTICKS for row in ranked) else ""
    sentence = f"{among}{first['method']} has the {end} mean test {context.metric} over clients: {_score(first)}."
    ahead_of_it = ""
    for row in ranked:
        if row["role"] in YARDSTICKS and row is not first:
            ahead = row["mean"] != first["mean"] and (row["mean"] > first["mean"]) == context.higher
            where = "ahead of it" if ahead else "behind"
            ahead_of_it = row["method"] if ahead and row["role"] == "siloed" else ahead_of_it
            sentence += f" {YARDSTICKS[row['role']]} is {where} with {number(row['mean'])} ({row['method']})."
    unranked = [row["method"] for row in context.overview if not _complete(row)]
    if unranked:
        sentence += f" Not ranked, for the problems below: {', '.join(unranked)}."
    short = first["method"] + (f", behind {ahead_of_it}" if ahead_of_it else "")
    return Answer(BEST, short, sentence, first["method"])


def _real(context: Context, first: Row, methods: Sequence[Row]) -> Answer:
    question = "Is the difference real?"
    best = first["method"]
    if len(methods) < 2:
        text = f"No method but {best} has all seeds on the same data, so there is no second to compare it with."
        return Answer(question, "Nothing to compare", text)
    second = methods[1]["method"]
    lines = context.study.differences(best)
    line = next(line for line in lines if line["method"] == second)
    if not is_number(line["mean"]):
        text = f"{best} and the second, {second}, have no seed in common, so nothing is paired."
        return Answer(question, "Not known", text)
    size = number(abs(line["mean"]))
    if line["p"] is None:
        return Answer(
            question,
            "One seed: cannot be said",
            f"{best} is {size} ahead of the second, {second}, in one run of each. Whether that is more than chance needs "
            "more seeds.",
        )
    if line["ci95"][0] == line["ci95"][1]:
        return Answer(
            question,
            "Cannot be said",
            f"{best} is {size} ahead of the second, {second}, by exactly the same at each of {line['n']} seeds: seeds that "
            "change nothing say nothing about chance.",
        )
    low, high = sorted(abs(end) if (end > 0) == (line["mean"] > 0) else -abs(end) for end in line["ci95"])
    p, adjusted, n = line["p"], line["p_holm"], line["n"]
    compared = sum(other["p"] is not None for other in lines)
    holm = f", adjusted for {compared} comparisons {p_value(adjusted)}" if compared > 1 else ""
    over = {"splits": "overlapping splits", "folds": "disjoint folds"}.get(context.study.data.sampling, "seeds")
    sentence = (
        f"{best} is {size} ahead of the second, {second} (95\u00a0% interval {pair((low, high))}, paired over {n} {over}, "
        f"p {_equals(p)}{holm}). "
    )
    if adjusted < ALPHA and over == "seeds":
        short, verdict = "Yes, for this test set", "That is more than the variation between training seeds."
    elif adjusted < ALPHA:
        short, verdict = f"Yes, over {over}", f"That is more than the variation between {over}."
    elif p < ALPHA:
        short, verdict = (
            "Not after adjustment",
            f"Taken alone it is more than the variation between {over}; among so many comparisons it may be chance.",
        )
    else:
        short, verdict = (
            "Not distinguishable",
            f"That is within the variation between {over}: their order may be chance.",
        )
    if line["p_clients"] is not None:
        verdict += f" Over clients (signed ranks: would other clients gain too?) p {_equals(line['p_clients'])}."
    few = " With so few seeds only large differences can show." if n < FEW_SEEDS and adjusted >= ALPHA else ""
    return Answer(question, short, sentence + verdict + few)


def _whom(context: Context, first: Row, methods: Sequence[Row]) -> Answer | None:
    gains = _gains(context, str(first["method"]))
    worst = [row for row in methods if is_number(row.get("worst"))]
    kindest = (max if context.higher else min)(worst, key=lambda row: row["worst"]) if worst else None
    whose = "The" if first["role"] in YARDSTICKS else "Among the federated methods, the"
    kindness = ""
    if kindest is not None:
        value = number(kindest["worst"])
        fares = f"has {value}" if len(context.overview) == 1 else f"fares best with {kindest['method']} ({value})"
        kindness = f" {'The' if len(context.overview) == 1 else whose} worst-served client {fares}."
    if gains is not None:
        better, total, reference = gains
        return Answer(
            "For whom?",
            f"{better} of {total} clients gain",
            f"With {first['method']}, {better} of {total} clients score better than with their own model alone "
            f"({reference}), by their means over seeds.{_harm(context, str(first['method']))}{kindness}",
        )
    if kindest is None:
        return None
    return Answer("For whom?", f"Worst client: {number(kindest['worst'])}", kindness.strip(), kindest["method"])


def _harm(context: Context, method: str) -> str:
    """Return a sentence about the clients that lose by a method, where any does."""
    line = next((line for line in context.study.negative_transfer() if line["method"] == method), None)
    if line is None or not line["lose"]:
        return ""
    worst = f"{number(-line['worst'])} (client {line['client']})"
    if line["lose"] == 1:
        return f" One loses {worst}."
    return f" {line['lose']} lose, {number(-line['mean_loss'])} on average and at most {worst}."


def _gains(context: Context, method: str) -> tuple[int, int, str] | None:
    """Return how many clients are better off with `method` than siloed, of how many, and the name of the siloed run."""
    siloed = context.siloed
    if siloed is None or siloed == method:
        return None
    gains = [gain for gain in context.by_client("gain").get(method, {}).values() if is_number(gain)]
    return (sum(gain > 0 for gain in gains), len(gains), siloed) if gains else None


def _price(methods: Sequence[Row], first: Row) -> Answer | None:
    if not is_number(first.get("mb_up")) or not is_number(first.get("mb_down")):
        return None
    sent = {row["method"]: row["mb_up"] + row["mb_down"] for row in methods if is_number(row.get("mb_up"))}
    sent_by_first = sent[first["method"]]
    least = min(sent, key=lambda name: sent[name])
    steps = first.get("local_steps")
    sentence = f"{first['method']} sends {_megabytes(sent_by_first)} up and down in a whole run"
    if is_number(steps):
        sentence += f" and takes {number(steps, 0)} local steps"
    sentence += "."
    if sent[least] < sent_by_first:
        other = next(row for row in methods if row["method"] == least)
        sentence += f" The least is sent by {least}: {_megabytes(sent[least])}, for a mean of {number(other['mean'])}."
    elif len(sent) > 1:
        sentence += " No other federated method sends less."
    return Answer("At what price?", _megabytes(sent_by_first), sentence)


def _score(row: Row) -> str:
    seeds, interval = row["n_seeds"], row.get("ci95")
    if seeds < 2 or interval is None:
        return f"{number(row['mean'])} (one seed, so no interval)"
    return f"{number(row['mean'])} (95\u00a0% interval {pair(interval)} over {seeds} seeds)"


def _equals(p: float) -> str:
    return p_value(p) if p < 0.001 else f"= {p_value(p)}"


def _megabytes(amount: float) -> str:
    return f"{number(amount, 0 if amount >= 100 else 1 if amount >= 10 else 2 if amount >= 1 else 3)} MB"
