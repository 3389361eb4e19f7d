"""Section about what attackers got of the models of runs: what `fedlightning leakage` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fedlightning.report.cells import Column, is_number, summary
from fedlightning.report.context import METHOD, Context
from fedlightning.report.figures.dots import Dot, dot_plot
from fedlightning.report.figures.images import side_by_side
from fedlightning.report.html import Picture, Prose, Section
from fedlightning.report.leakage_sentences import describe_attacks

FILE = "leakage.json"


def leakage(context: Context) -> Section | None:
    """Show membership, whose a sample is, the bound of epsilon and images that were made again."""
    attacks = _read_attacks(context)
    rows = [_row(method, seed, attack) for (method, seed), attack in attacks.items()]
    columns = [
        METHOD,
        Column("seed", "seed", "text"),
        Column("auc", "AUC", interval="interval", group="members by the loss",
               help="probability that a training sample has a lower loss than another one; 0.5: nothing is given away"),
        Column("hits", "found", "percent", group="members by the loss", help="members found at 1 % false alarms"),
        Column("hits_chance", "by chance", "percent", group="members by the loss", help="members that chance finds so"),
        Column("ratio", "AUC", interval="ratio_interval", group="members by shadow runs",
               help="the same by the likelihood ratio of each sample, which models without it give"),
        Column("ratio_hits", "found", "percent", group="members by shadow runs", help="members found at 1 % false alarms"),
        Column("ratio_chance", "by chance", "percent", group="members by shadow runs", help="members that chance finds so"),
        Column("sites", "named", "percent", group="client of a sample",
               help="samples whose client the class probabilities name"),
        Column("chance", "by class alone", "percent", group="client of a sample"),
        Column("epsilon", "at least", decimals=2, group="epsilon", help="by canaries, with 95 % confidence"),
        Column("accounted", "accounted", decimals=2, group="epsilon"),
        Column("psnr", "PSNR", decimals=1, group="images", help="decibels of images made again from one step's gradient"),
        Column("psnr_of_mean", "of the mean image", decimals=1, group="images", help="that of a guess without gradient"),
    ]  # fmt: skip
    if not rows:
        return None
    several = len(attacks) > 1
    notes = [
        f"{method}, seed {seed}: {line}" if several else line
        for (method, seed), attack in attacks.items()
        for line in describe_attacks(attack)
    ]
    table = context.table("leakage", "What attacks on the models of a run got", columns, rows, seeds=False)
    return context.section(
        "leakage",
        "What attackers got",
        "Leakage",
        [context.gallery(_pictures(context, attacks, rows), table, open=True) or table, Prose(notes, title="In words")],
        "Attacks that were made on finished runs (fedlightning leakage). An attack that finds nothing proves nothing: "
        "better ones may come.",
    )


def _read_attacks(context: Context) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what the runs' folders have, by method and seed; a file that holds something else counts as none."""
    attacks = {}
    for (method, seed), attack in context.read_of_runs(FILE).items():
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            _row(method, seed, attack), describe_attacks(attack)
            attacks[method, seed] = attack
    return attacks


def _row(method: str, seed: str, attack: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of a run: of several models the one that gives most away."""
    members = max(attack.get("membership") or [{}], key=lambda row: row.get("auc") or 0.0)
    parts = [attack.get(name) or {} for name in ("likelihood_ratio", "sites", "canaries", "inversion")]
    ratio, sites, canaries, images = parts
    return {
        "method": method,
        "seed": seed,
        "auc": members.get("auc"),
        "interval": _pair(members),
        "hits": _percent(members.get("hits")),
        "hits_chance": _percent(members.get("chance")),
        "ratio": ratio.get("auc"),
        "ratio_interval": _pair(ratio),
        "ratio_hits": _percent(ratio.get("hits")),
        "ratio_chance": _percent(ratio.get("chance")),
        "sites": _percent(sites.get("accuracy")),
        "chance": _percent(sites.get("chance")),
        "epsilon": canaries.get("epsilon"),
        "accounted": canaries.get("accounted"),
        "psnr": images.get("psnr"),
        "psnr_of_mean": images.get("psnr_of_mean"),
    }


def _percent(share: Any) -> float | None:
    return 100 * share if is_number(share) else None


def _pair(row: Mapping[str, Any]) -> list[float] | None:
    pair = [row.get("low"), row.get("high")]
    return pair if all(map(is_number, pair)) else None  # type: ignore[return-value]


def _pictures(
    context: Context, attacks: Mapping[tuple[str, str], Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[Picture]:
    """Return the figure of membership, and the images of the first run that has some."""
    pictures = []
    lines = []
    for row in rows:
        label = row["method"] if len({attack["seed"] for attack in rows}) == 1 else f"{row['method']}, {row['seed']}"
        for key, interval, how in (("auc", "interval", "loss"), ("ratio", "ratio_interval", "ratio")):
            if is_number(row[key]):
                lines.append(context.line(row["method"], [Dot(row[key], row[interval])], f"{label} ({how})"))
    if lines:
        shown = [(line.label, line.dots[0].mean) for line in lines]
        text = f"Dots: AUC of membership, 0.5 is chance: {summary(shown)}."
        title = "Members told from others"
        pictures.append(
            context.picture("leakage", title, text, lambda: dot_plot(lines, "AUC, 0.5 is chance", at=("chance", 0.5)))
        )
    for (method, _), attack in attacks.items():
        images = (attack.get("inversion") or {}).get("images")
        if images:
            many = len(images[0])
            text = f"Images of one training step of {many} and those made again from its gradient, {method}."
            pictures.append(
                context.picture(
                    "leakage-images", f"Images from a gradient: {method}", text, partial(side_by_side, images)
                )
            )
            break
    return pictures
