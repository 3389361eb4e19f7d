"""Names of entries, layers and modules, as users and layers give them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fedlightning.layers.leaves import Layer


def expand(names: Iterable[str], available: Iterable[str]) -> list[str]:
    """Return exact names for a list of names and module paths, in the order of `available` and each once.

    `"layer1"` (or `"layer1."`) means everything inside the module `layer1` and nothing inside `layer10`.

    Args:
        names: Exact `state_dict` names or module paths; one or several.
        available: The names to choose from.

    Raises:
        ValueError: If an entry matches nothing. The message names it and close matches.

    Example:
        >>> from fedlightning.layers import expand
        >>> expand("fc1", ["fc1.weight", "fc1.bias", "fc10.weight"])
        ['fc1.weight', 'fc1.bias']
    """
    pool = list(dict.fromkeys(available))
    chosen: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        path = name.removesuffix(".")
        matches = [candidate for candidate in pool if candidate == path or (path and candidate.startswith(path + "."))]
        if not matches:
            paths = {full.rsplit(".", cut)[0] for full in pool for cut in range(full.count(".") + 1)}
            raise ValueError(
                unknown_name(name, sorted(paths), "is neither a name in the state nor a module path in it")
            )
        chosen.update(matches)
    return [name for name in pool if name in chosen]


def state_names(layer: Layer) -> list[str]:
    """Return the names of everything in a layer, parameters then buffers, as in `state_dict`.

    Args:
        layer: A layer from `ordered_layers` or `pieces`.

    Example:
        >>> from fedlightning.layers import ordered_layers, state_names
        >>> from fedlightning.models import MLP
        >>> state_names(ordered_layers(MLP(4, [3], 2))[-1])
        ['fc2.weight', 'fc2.bias']
    """
    return [*layer.parameters, *layer.buffers]


def as_names(names: str | Iterable[str] | None) -> list[str]:
    """Return names of entries or modules as a list.

    Args:
        names: One name, several, or `None` for none.

    Example:
        >>> from fedlightning.layers import as_names
        >>> as_names("net.head"), as_names(["a", "b"]), as_names(None)
        (['net.head'], ['a', 'b'], [])
    """
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(names)


def unknown_name(name: str, names: Iterable[str], what: str) -> str:
    """Return the sentence for a name that does not exist, with close matches."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = "Close matches" if close else "There are"
    return f"{name!r} {what}. {hint}: {', '.join(map(repr, close or names[:10])) or 'none at all'}."
