"""The data module of a server whose clients' data are at their sites: there is nothing in it."""

from __future__ import annotations

from typing import NoReturn

from fedlightning.datamodules.held_out import WithoutClients


class DataElsewhere(WithoutClients):
    """Stands where a data module stands, in a process that has no data. Whoever asks it for some is told so."""

    def __repr__(self) -> str:
        """Return the class."""
        return f"<{type(self).__name__}>"

    def _refuse(self) -> NoReturn:
        raise ValueError("the clients' data are asked for in the server's process, and they are at their sites")
