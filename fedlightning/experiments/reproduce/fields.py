"""Reading plain values from YAML with a sentence for everything that is misspelt, missing or of the wrong kind."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedlightning.config.errors import InputError, suggestion
from fedlightning.config.value_checks import refuse_form

_MISSING: Any = object()


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the named values of a YAML file.

    Raises:
        InputError: If there is no such file, it is no YAML, it holds no named values, or one of them twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        refuse_form(text)
        found = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is no YAML that can be read: {' '.join(str(error).split())[:200]}.") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no named values, so nothing can be read from it.")
    return found


class Fields:
    """The named values of one block of a file. What is taken is checked; what is left at the end was misspelt.

    Args:
        values: The block.
        file: Name of the file, for messages.
        where: Place of the block, for messages.
    """

    def __init__(self, values: Mapping[Any, Any], file: str, where: str) -> None:
        self._values, self.file, self.where = dict(values), file, where
        self._taken: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def error(self, text: str) -> InputError:
        """Return an error about this block."""
        return InputError(f"{self.file}: {self.where or 'the table'} {text}")

    def whole(self) -> Mapping[str, Any]:
        """Return all values."""
        return self._values

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """Return a value; it must be there unless it has a default."""
        self._taken.append(key)
        value = self._values.get(key, default)
        if value is _MISSING:
            near = next((one for one in self._values if one not in self._taken and _alike(key, str(one))), None)
            hint = f" Is '{near}' misspelt?" if near is not None else ""
            raise self.error(f"has no '{key}'.{hint}")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        """Return a text."""
        value = self.take(key, default)
        if isinstance(value, Mapping | list) or value is None:
            raise self.error(f"has {key}: {value!r:.60}, which is no text.")
        return str(value).strip()

    def number(self, key: str, default: Any = _MISSING, low: float = -math.inf) -> float:
        """Return a finite number of at least `low`."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"has {key}: {value!r:.60}, which is no number.")
        if value < low:
            raise self.error(f"has {key}: {value}, which is below {low:g}.")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.error(f"has {key}: {value!r:.60}. Give true or false.")
        return value

    def choice(self, key: str, known: Sequence[str], default: Any = _MISSING) -> str:
        """Return one of several words."""
        value = self.take(key, default)
        if value not in known:
            raise self.error(f"has {key}: {value!r:.60}. Give {', '.join(known[:-1])} or {known[-1]}.")
        return str(value)

    def texts(self, key: str, among: Collection[str] | None = None) -> list[str]:
        """Return a list of texts; one text is a list of one. `among`: those that there are; `None`: any."""
        value = self.take(key, [])
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in listed):
            raise self.error(f"has {key}: {value!r:.60}. Give a text, or a list of texts.")
        if among is not None and not set(listed) <= set(among):
            raise self.error(f"has {key}: {value!r:.60}. Give some of {', '.join(among)}.")
        return [str(one).strip() for one in listed]

    def mapping(self, key: str) -> dict[str, Any]:
        """Return named values, none if the key is not there."""
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise self.error(f"has {key}: {value!r:.60}. Give named values (NAME: VALUE).")
        return {str(name): inner for name, inner in value.items()}

    def section(self, key: str) -> Fields:
        """Return a block of named values."""
        return Fields(self.mapping(key), self.file, key)

    def named_sections(self, key: str, short: str | None = None) -> Iterator[tuple[str, Fields]]:
        """Return blocks by their names; a value that is no block stands for its key `short`."""
        for name, value in self.mapping(key).items():
            whole = value if isinstance(value, Mapping) or short is None else {short: value}
            where = f"{key.removesuffix('s')} '{name}'"
            if not isinstance(whole, Mapping):
                raise self.error(f"has {where}: {value!r:.60}. Give named values (NAME: VALUE).")
            yield name, Fields(whole, self.file, where)

    def sections(self, key: str) -> list[Fields]:
        """Return the blocks of a list; one block is a list of one."""
        value = self.take(key, [])
        listed = [value] if isinstance(value, Mapping) else value
        if not isinstance(listed, list) or not all(isinstance(one, Mapping) for one in listed):
            raise self.error(f"has {key}: {value!r:.60}. Give a list of blocks.")
        names = (
            f"{key.removesuffix('s')} {number}" if len(listed) > 1 else key for number in range(1, len(listed) + 1)
        )
        return [Fields(one, self.file, name) for one, name in zip(listed, names, strict=True)]

    def known(self, name: str, names: Iterable[str], what: str) -> None:
        """Refuse a name that is not one of several."""
        listed = [str(one) for one in names]
        if name not in listed:
            hint = suggestion(name, listed) or f"There is {', '.join(sorted(listed)) or 'none'}."
            raise self.error(f"names '{name}' ({what}), which is not in this file. {hint}")

    def end(self) -> None:
        """Refuse what nobody has taken."""
        left = next((str(key) for key in self._values if key not in self._taken), None)
        if left is not None:
            hint = suggestion(left, self._taken) or f"It may have {', '.join(sorted(set(self._taken)))}."
            raise self.error(f"has the key '{left}', which means nothing here. {hint}")


def _alike(key: str, other: str) -> bool:
    return bool(suggestion(other, [key]))
