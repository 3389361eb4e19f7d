"""Clients that failed in a run, by client and reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TELLING = 120
"""Characters of a reason that are shown."""


Sites = Mapping[str, Sequence[str]]
"""Clients of each site, by its name, as `sites` of a `summary.json`."""


def site_of(sites: Sites) -> dict[str, str]:
    """Return the name of each client's site, where it is called otherwise than the client.

    Example:
        >>> site_of({"cleveland": ["a", "b"], "basel": ["basel"]})
        {'a': 'cleveland', 'b': 'cleveland'}
    """
    return {client: site for site, clients in sites.items() for client in clients if client != site}


def failure_rows(failures: Iterable[Mapping[str, Any]], sites: Sites | None = None) -> list[dict[str, Any]]:
    """Group the failures of a run: one row for every client, place, reason and decision.

    Example:
        >>> reason = "client 'b' failed: ValueError: no scanner. Ask the site"
        >>> one = {"client": "b", "where": "training", "reason": reason, "decision": "left out"}
        >>> seen = [{"round": r, **one} for r in (1, 2, 5)]
        >>> [(row["reason"], row["decision"], row["rounds"], row["count"]) for row in failure_rows(seen)]
        [('ValueError: no scanner', 'left out', '1-2, 5', 3)]
    """
    places = site_of(sites or {})
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for failure in failures:
        key = (failure["client"], failure["where"], first_sentence(failure["reason"]), failure["decision"])
        groups.setdefault(key, []).append(failure["round"])
    return [
        {"client": client, **({"site": places.get(client, client)} if places else {})}
        | {"where": where, "reason": reason, "decision": decision}
        | {"rounds": ranges(rounds), "count": len(rounds)}
        for (client, where, reason, decision), rounds in groups.items()
    ]


def failures_line(
    failures: Sequence[Mapping[str, Any]], clients: int, file: str = "summary.json", sites: Sites | None = None
) -> str | None:
    """Say in a line which clients failed; `None` if none did."""
    rows = sorted(failure_rows(failures), key=lambda row: -row["count"])
    if not rows:
        return None
    failed = len({row["client"] for row in rows})
    worst = rows[0]
    site = site_of(sites or {}).get(worst["client"])
    at = "" if site is None else f" at site '{site}'"
    return (
        f"Failures: {failed} of {clients} clients, {len(failures)} in all; most often client '{worst['client']}'{at} "
        f"({worst['where']}, {worst['count']}x, {worst['decision']}): {worst['reason']}. All are in {file}."
    )


def first_sentence(reason: str) -> str:
    """Return the first sentence of a reason, without the client's name in front.

    Example:
        >>> first_sentence("client 'a' was not scored at stage G on local val data: KeyError: 'x'. More")
        "KeyError: 'x'"
    """
    text = " ".join(reason.split())
    text = re.sub(r"^client '.*?' (?:failed|was not scored at stage \w+ on \S+ \w+ data): ", "", text)
    text = re.sub(r"^the update of client '.*?' was refused: ", "refused: ", text)
    text = re.sub(r"^client '.*?' (?=has )", "", text)
    sentence = re.split(r"\. (?=[A-Z])", text)[0].rstrip(".")
    return sentence if len(sentence) <= TELLING else sentence[: TELLING - 1] + "…"


def ranges(rounds: Iterable[int]) -> str:
    """Return numbers in short form.

    Example:
        >>> ranges([1, 2, 3, 3, 7])
        '1-3, 7'
    """
    parts: list[list[int]] = []
    for number in sorted(set(rounds)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
