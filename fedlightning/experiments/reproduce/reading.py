"""Reading a table from its YAML file. What cannot work is refused here, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlightning.config.errors import InputError
from fedlightning.errors import EXTRAS
from fedlightning.experiments.reproduce.fields import Fields, read_yaml
from fedlightning.experiments.reproduce.measures import Spec
from fedlightning.experiments.reproduce.specs import check_measure, runs_of
from fedlightning.experiments.reproduce.tables import ALL, READ, WHOLE, Cell, Data, Order, RunSpec, Source, Table


def read_table(path: Path, configs: Path) -> Table:
    """Read a table.

    Args:
        path: The YAML file.
        configs: Folder that `configs` of a run are relative to, unless they lie beside the table.

    Raises:
        InputError: If something in it cannot work. The sentence names the file, the place and the way out.
    """
    top = Fields(read_yaml(path), path.name, "")
    source = top.section("source")
    where = Source(source.text("paper"), source.text("table"), source.text("link", ""), source.choice("read", READ))
    source.end()
    sets, exact, reduced = top.texts("sets"), top.flag("exact"), top.flag("reduced")
    runs = _runs(top, path, configs, sets, reduced)
    measures: dict[str, Spec] = {}
    for name, spec in top.mapping("measures").items():  # a measure may be made of those above it
        measures[name] = check_measure(spec, name, top, runs, measures)
    reader = _Cells(top, runs, measures, where.read)
    cells = reader.cells()
    orders = [order for one in top.sections("orders") for order in reader.orders(one)]
    if not cells and not orders:
        raise top.error("has no cell and no order. Give rows, cells or orders.")
    _unique(top, "cell", (cell.name for cell in cells))
    _unique(top, "order", (order.name for order in orders))
    why = {key: str(text).strip() for key, text in top.mapping("why").items()}
    places = {WHOLE, *(name for cell in cells for name in (cell.name, cell.row, cell.column))}
    for key in why:
        top.known(key, places, "why")
    _all_used(top, runs, cells, orders)
    table = Table(
        name=path.stem,
        path=path,
        title=top.text("title"),
        source=where,
        claim=top.text("claim"),
        setting=top.text("setting"),
        departures=top.texts("departures"),
        detects=top.texts("detects"),
        cannot_detect=top.texts("cannot_detect"),
        tuned_on_test=top.flag("tuned_on_test"),
        sets=sets,
        minutes=_minutes(top, sets, runs),
        data=[read_data(one) for one in top.sections("data")],
        extras=top.texts("extras", among=EXTRAS),
        seeds=_seeds(top),
        vary=top.texts("vary") if "vary" in top else None,
        exact=exact,
        runs=runs,
        cells=cells,
        orders=orders,
        why=why,
    )
    top.end()
    return table


def _minutes(top: Fields, sets: Sequence[str], runs: Mapping[str, RunSpec]) -> dict[str, float]:
    """Return the expected minutes of each set; one number is that of the table's first set, or of all runs."""
    if not isinstance(top.whole().get("minutes"), Mapping):
        names = [*sets[:1], *([ALL] if all(run.sets == list(sets) for run in runs.values()) else [])]
        return dict.fromkeys(names or [ALL], top.number("minutes", low=0))
    given, known = top.section("minutes"), {ALL, *sets, *(name for run in runs.values() for name in run.sets)}
    if not given.whole():
        raise top.error("has minutes: {}. Give one number, or one for each set.")
    for name in given.whole():
        top.known(str(name), known, "minutes")
    return {str(name): given.number(name, low=0) for name in given.whole()}


def _runs(top: Fields, path: Path, configs: Path, sets: Sequence[str], reduced: bool) -> dict[str, RunSpec]:
    shared = top.section("common")
    files, config, options = shared.texts("configs"), shared.mapping("config"), shared.mapping("options")
    curve = shared.flag("test_curve")
    shared.end()
    found = {}
    for name, one in top.named_sections("runs", short="configs"):
        stack = [_file(one, file, path, configs) for file in [*files, *one.texts("configs")]]
        run = RunSpec(
            name=name,
            configs=stack,
            config=_merged(config, one.mapping("config")),
            options={**options, **one.mapping("options")},
            differs=one.text("differs", ""),
            sets=one.texts("sets") if "sets" in one else sets,
            reduced=one.flag("reduced", reduced),
            test_curve=one.flag("test_curve", curve),
        )
        if not run.configs and not run.config:
            raise one.error("has no configuration. Give configs (files), config (written here), or both.")
        one.end()
        found[name] = run
    return found


def _file(run: Fields, name: str, path: Path, configs: Path) -> Path:
    """Return the place of a configuration: beside the table, or among the configurations."""
    for folder in (path.parent, configs):
        if (folder / name).is_file():
            return folder / name
    raise run.error(f"names the configuration '{name}', which lies neither beside the table nor in {configs}.")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if both else value
    return out


def read_data(one: Fields) -> Data:
    """Return data that must be there, from their block."""
    made = Data(
        name=one.text("name"),
        roots=one.texts("root"),
        files=one.texts("files"),
        get=one.text("get"),
        option=one.text("option", Data.option),
    )
    one.end()
    if not made.roots or not made.files:
        raise one.error("needs a root (a folder below --data-root) and files (what must lie there).")
    return made


def _seeds(top: Fields) -> list[int]:
    given = top.take("seeds", 1)
    seeds = list(range(given)) if isinstance(given, int) and not isinstance(given, bool) else given
    whole = isinstance(seeds, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in seeds)
    if not whole or not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise top.error(f"has seeds: {given!r}. Give a number of seeds (5), or a list of different ones ([0, 3]).")
    return seeds


class _Cells:
    """Reader of cells and orders, which name runs and measures."""

    def __init__(self, top: Fields, runs: Mapping[str, RunSpec], measures: Mapping[str, Spec], read: str) -> None:
        self.top, self.runs, self.measures, self.read = top, runs, measures, read

    def cells(self) -> list[Cell]:
        """Return the cells of `rows` and `columns`, and those of `cells`."""
        found = []
        columns = {name: dict(one.whole()) for name, one in self.top.named_sections("columns", short="measure")}
        for row, one in self.top.named_sections("rows"):
            run, published = one.text("run", row), one.mapping("published")
            one.end()
            for column, value in published.items():
                self.top.known(column, columns, f"row '{row}'")
                own = dict(value) if isinstance(value, Mapping) else {"published": value}
                given = {"run": run, **columns[column], **own, "row": row, "column": column}
                found.append(self._cell(Fields(given, self.top.file, f"cell '{row} / {column}'")))
        return found + [self._cell(one) for one in self.top.sections("cells")]

    def _cell(self, one: Fields) -> Cell:
        row, column = one.text("row"), one.text("column")
        one.where = f"cell '{row} / {column}'"
        spec = self._measure(one)
        run = None if spec.kind == "epsilon" else one.text("run")
        one.take("run", None)
        if run is not None:
            one.known(run, self.runs, "run")
        published, tolerance = one.number("published"), one.number("tolerance", low=0)
        read = one.choice("read", READ, self.read)
        one.end()
        reduced = any(self.runs[name].reduced for name in [run, *runs_of(spec)] if name is not None)
        because = (
            "the number is from memory" if read == "memory" else "reduced: its order alone counts" if reduced else ""
        )
        return Cell(row, column, run, spec, published, tolerance, not because, because)

    def orders(self, one: Fields) -> list[Order]:
        """Return an order for every pair of better and worse runs."""
        sides = [self._side(one, key) for key in ("better", "worse")]
        default = None if all(spec for side in sides for _, spec in side) else self._measure(one)
        one.take("measure", None)
        factor, margin = one.number("factor", 1.0, low=0), one.number("margin", 0.0)
        published, read = one.text("published", ""), one.choice("read", READ, self.read)
        one.end()
        return [
            Order(a, b, (first or default, second or default), factor, margin, published, read != "memory")  # type: ignore[arg-type]
            for a, first in sides[0]
            for b, second in sides[1]
        ]

    def _side(self, one: Fields, key: str) -> list[tuple[str, Spec | None]]:
        given = one.take(key)
        found: list[tuple[str, Spec | None]] = []
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, Mapping):
                inner = Fields(value, one.file, f"{one.where}, {key}")
                found.append((inner.text("run"), self._measure(inner)))
                inner.end()
            else:
                found.append((str(value), None))
            one.known(found[-1][0], self.runs, key)
        if not found:
            raise one.error(f"has no run in '{key}'.")
        return found

    def _measure(self, one: Fields) -> Spec:
        given = one.take("measure")
        if isinstance(given, str) and given in self.measures:
            return self.measures[given]
        return check_measure(given, "", one, self.runs, self.measures)


def _unique(top: Fields, kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise top.error(f"has the {kind} '{name}' twice. Give each one once.")
        seen.add(name)


def _all_used(top: Fields, runs: Mapping[str, RunSpec], cells: Sequence[Cell], orders: Sequence[Order]) -> None:
    used = {name for cell in cells for name in cell.runs} | {name for order in orders for name in order.runs}
    idle = next((name for name in runs if name not in used), None)
    if idle is not None:
        raise InputError(f"{top.file}: run '{idle}' is in no cell and in no order. Take it out, or give it a cell.")
