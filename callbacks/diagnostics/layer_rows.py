"""Numbers about layers, as rows: one quantity of one layer of one client's model, at one stage of one round."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ALL = "all"
"""In the place of a client: of all clients together."""


@dataclass(frozen=True)
class LayerRow:
    """One number.

    Attributes:
        round: counted from 1 (of a plain Trainer's run: the epoch).
        stage: ``L1``: before local training; ``L2``: after it.
        client: the client's id, or ``all``: the sum over clients of a sensitivity, the mean over pairs of CKA.
        layer_index: from 1, in the order in which a forward pass meets the layers; layer: its name.
        quantity: what it is, by name.
        value: the number; a ratio may be infinite or NaN.
        std_error: its standard error; NaN where there is none.
    """

    round: int
    stage: str
    client: str
    layer_index: int
    layer: str
    quantity: str
    value: float
    std_error: float = float("nan")


COLUMNS = [field.name for field in fields(LayerRow)]


def write_layers(path: Path, rows: Iterable[LayerRow], append: bool = True) -> None:
    """Append ``rows`` to the CSV at ``path`` (with a header when it is new), or replace it at once by a new one."""
    new = not append or not path.exists()
    written = path if append else path.with_name(path.name + ".tmp")
    written.parent.mkdir(parents=True, exist_ok=True)
    with written.open("w" if new else "a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(astuple(row) for row in rows)
    if written != path:
        os.replace(written, path)


def read_layers(path: str | Path) -> list[LayerRow]:
    """The rows of a ``layers.csv``, or of that of a run's folder; empty if there is none.

    A last line that was cut off when the process was killed is left out.
    """
    path = Path(path)
    path = path / "layers.csv" if path.is_dir() else path
    if not path.exists():
        return []
    text = path.read_text()
    complete = text[: text.rfind("\n") + 1]
    return [
        LayerRow(
            round=int(line["round"]),
            stage=line["stage"],
            client=line["client"],
            layer_index=int(line["layer_index"]),
            layer=line["layer"],
            quantity=line["quantity"],
            value=float(line["value"]),
            std_error=float(line["std_error"]),
        )
        for line in csv.DictReader(complete.splitlines())
    ]


def cut_layers(path: Path, rounds: int) -> None:
    """Keep the first ``rounds`` rounds of the CSV at ``path``: a resumed run writes the others again."""
    if not path.exists():
        return
    rows = read_layers(path)
    kept = [row for row in rows if row.round <= rounds]
    if len(kept) < len(rows) or not path.read_text().endswith("\n"):
        write_layers(path, kept, append=False)
