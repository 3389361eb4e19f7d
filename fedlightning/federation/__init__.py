"""The server side: server, aggregation, rounds, the stages at which models are scored, the engine's contract."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`Federation` was here when this was one file."""
    if name == "Federation":
        from fedlightning.federation.federation import Federation

        return Federation
    raise AttributeError(f"module 'fedlightning.federation' has no attribute '{name}'")
