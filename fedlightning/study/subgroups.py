"""Subgroups of test samples that a user names: the values of a column, or a number from which on."""

from __future__ import annotations

from collections.abc import Iterable

from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.ranges import number_in

MAX_SUBGROUPS = 12
"""Different values that a column of subgroups may have."""


def values_of(data: FederatedDataModule, client: str, subgroup: str) -> list[str]:
    """Return the subgroup of each test sample of a client; empty where it is not known.

    Args:
        data: The data module, after `setup`.
        client: The client.
        subgroup: `"sex"`, a column, or `"age>=65"`, a column of numbers and where it is cut.

    Raises:
        ValueError: If there is no such column, or it is cut and holds other than numbers.
    """
    column, sign, text = (part.strip() for part in subgroup.partition(">="))
    cells = data.sample_values(client, "test", column)
    if not sign:
        return cells
    try:
        bound = number_in(text)
        return ["" if not cell else f">={text}" if number_in(cell) >= bound else f"<{text}" for cell in cells]
    except ValueError as error:
        raise ValueError(f"Subgroup {subgroup!r} cuts a column of numbers: {error}.") from error


def check_subgroups(data: FederatedDataModule, subgroups: Iterable[str]) -> None:
    """Refuse columns that are not there, and those with so many values that no subgroup has many samples.

    Raises:
        ValueError: With the column.
    """
    for subgroup in subgroups:
        values = {value for client in data.client_ids for value in values_of(data, client, subgroup) if value}
        if len(values) > MAX_SUBGROUPS:
            raise ValueError(
                f"Subgroup {subgroup!r} has {len(values)} different values; at most {MAX_SUBGROUPS} make subgroups. Cut "
                f"numbers in two, as in '{subgroup}>=65'."
            )
