"""`fedlightning site` whose answers to the first visits are nonsense: bytes, many of them, answers to other questions."""

from __future__ import annotations

import sys

from fedlightning.cli import main
from fedlightning.contract.messages import Update
from fedlightning.engines.contract import Visit
from fedlightning.sites.site import Site
from fedlightning.wire import read, write

REPLIES = [
    b"nonsense",
    b"\xff" * 8 + bytes(20_000_000),
    write({"answer": []}),
    write({"answer": Update(3, "0", num_samples=3)}),
    write({"answer": Update(4, "1", num_samples=3), "version": "x", "note": {"is_personal": 1}}),
]
WHY = ["its header", "its header", "a list", "client=", "no version of its record"]
"""What the server is to say of each."""
WHOLE = 2
"""Number of replies, from the first, that stand for all that was asked."""
answer = Site.answer


def nonsense(site: Site, request: bytes) -> bytes:
    tasks = [one["task"] for one in read(request).get("tasks", [])]
    round = next((task.message.round for task in tasks if isinstance(task, Visit)), len(REPLIES))
    if round >= len(REPLIES):
        return answer(site, request)
    if round < WHOLE:
        return REPLIES[round]
    parts = read(answer(site, request))["answer"]
    return write(
        {
            "answer": [
                REPLIES[round] if isinstance(task, Visit) else part for task, part in zip(tasks, parts, strict=True)
            ]
        }
    )


if __name__ == "__main__":
    Site.answer = nonsense  # type: ignore[method-assign]
    sys.exit(main())
