"""`fedlightning leakage`: which attack is made, what is kept of it, and how it is shown."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedlightning.commands.json_output import plain, print_json
from fedlightning.commands.terminal import console, say, shown
from fedlightning.compat.rich_tables import print_whole
from fedlightning.config.errors import InputError
from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.leakage import canaries as audit
from fedlightning.leakage import in_words, inversion, leakage, likelihood_ratio
from fedlightning.storage.files import read_json, write_text_atomically
from fedlightning.trainer import FederatedTrainer

Attack = Literal["usual", "ratio", "canaries", "inversion"]
NOTHING: dict[str, Any] = {"membership": [], "sites": None, "missing": []}
NOTHING |= dict.fromkeys(("likelihood_ratio", "canaries", "inversion"))
FILE, PICTURE = "leakage.json", "leakage_images.png"


def leakage_by(
    attack: Attack,
    trainer: FederatedTrainer,
    data: FederatedDataModule,
    folder: Path,
    samples: int,
    shadows: int,
    canaries: int | None,
    power: float,
    unit: Literal["record", "client"] | None,
    batch: int,
    checkpoint: str,
) -> dict[str, Any]:
    """Make one attack, and return what `leakage.json` has now.

    Raises:
        InputError: If it cannot be made.
    """

    def tell(text: str) -> None:
        say(console(), f"{text} ...", markup=False)

    try:
        if attack == "usual":
            found = leakage(trainer, data, samples, checkpoint)
        elif attack == "ratio":
            found = {"likelihood_ratio": likelihood_ratio(trainer, data, shadows, samples, checkpoint, report=tell)}
        elif attack == "canaries":
            found = {"canaries": audit(trainer, data, canaries, unit, checkpoint=checkpoint, report=tell, power=power)}
        else:
            found = {"inversion": inversion(trainer, data, batch, picture=folder / PICTURE)}
    except ValueError as error:
        raise InputError(f"--attack {attack}: {error}") from error
    before = read_json(folder / FILE) if (folder / FILE).exists() else {}
    return {**NOTHING, **before, **plain(found)}


def show_leakage(found: dict[str, Any], attack: Attack, folder: Path, screen: Console, as_json: bool) -> None:
    """Write what was found, and show what is new."""
    write_text_atomically(folder / FILE, dumps(plain(found), indent=1) + "\n")
    new = {"ratio": "likelihood_ratio"}.get(attack, attack)
    now = {name: found[name] for name in (("membership", "sites", "missing") if attack == "usual" else (new,))}
    if attack == "usual":
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("model", "members", "others", "AUC", "95 % interval", "found at 1 % false alarms", "by chance"):
            table.add_column(name, justify="left" if name == "model" else "right")
        for row in found["membership"]:
            numbers = f"{row['auc']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"
            shares = f"{row['hits']:.1%}", f"{row['chance']:.1%}"
            table.add_row(row["model"], str(row["members"]), str(row["others"]), *numbers, *shares)
        print_whole(screen, table)
    for line in in_words(now):
        say(screen, f"\n{line}", markup=False)
    say(screen, f"\nWritten: {shown(folder / FILE)}{f' and {PICTURE}' if attack == 'inversion' else ''}")
    if as_json:
        images = found["inversion"] and {name: value for name, value in found["inversion"].items() if name != "images"}
        print_json("leakage", run=folder, **{**found, "inversion": images})
