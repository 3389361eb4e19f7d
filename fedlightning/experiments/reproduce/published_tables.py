"""A published table in its YAML file: its source, its runs, its cells and its orders.

What cannot work is refused when the file is read, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fedlightning.config.input_errors import InputError
from fedlightning.errors import EXTRAS
from fedlightning.experiments.reproduce.measures import Spec, read_measure
from fedlightning.experiments.yaml_blocks import Block, Names, Number, read_yaml
from fedlightning.ranges import Length, NonNegativeFloat

Read = Literal["source", "re-run", "memory"]
"""How a published number is known. From memory: it is printed, and never judged."""
Texts = list[str]
ALL = "all"
"""Key of `minutes` for all runs of a table, whatever sets they are in."""
ERROR = 0.05
"""Chance that the interval of at least one of a table's looks misses the true mean."""
WHOLE = "table"
"""Key of `why` for the paragraph about the whole table."""


@dataclass(frozen=True)
class Source:
    """Where a table was published.

    Attributes:
        paper: Authors, title and year.
        table: Table or figure of the paper.
        read: How its numbers are known.
        link: DOI, arXiv number or address.
    """

    paper: str
    table: str
    read: Read
    link: str = ""


@dataclass(frozen=True)
class Data:
    """Files that a table's runs read.

    Attributes:
        name: Name of the data set.
        root: Folders below the data root, the likeliest first; the first that holds all files is used.
        files: Files that must lie there.
        get: Where to get them, in words.
        option: Option of a run that is set to the folder.
    """

    name: str
    root: Annotated[Texts, Length(1)]
    files: Annotated[Texts, Length(1)]
    get: str
    option: str = "data.init_args.root"


@dataclass(frozen=True)
class RunSpec:
    """One run of a table, over all seeds.

    Attributes:
        name: Name in the table.
        configs: Files to stack, with their place.
        config: Configuration that is stacked upon the files.
        options: Options that override all of it.
        sets: Sets that the run belongs to.
        differs: What differs from the published setting.
        reduced: Whether it is smaller than the published setting: its cells are judged by order only.
        test_curve: Whether the scores of each round are taken on test data, as the paper took them.
    """

    name: str
    configs: Sequence[Path]
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    sets: Texts
    differs: str = ""
    reduced: bool = False
    test_curve: bool = False


@dataclass(frozen=True)
class Cell:
    """One published number.

    Attributes:
        row: Name of its row.
        column: Name of its column.
        run: Run that it is measured in; `None` for a number that needs no run.
        measure: What is measured.
        published: The published value.
        tolerance: Distance from it that still agrees.
        because: Why it gets no verdict: it is known from memory, or its run is reduced. Empty: it gets one.
    """

    row: str
    column: str
    run: str | None
    measure: Spec
    published: Number
    tolerance: NonNegativeFloat
    because: str = ""

    @property
    def name(self) -> str:
        """Row and column."""
        return f"{self.row} / {self.column}"

    @property
    def runs(self) -> list[str]:
        """All runs that the number is made from."""
        return list(dict.fromkeys([*([self.run] if self.run else []), *self.measure.runs]))

    def list_readings(self) -> list[tuple[str, Spec]]:
        """Return what it reads in runs, each with its run."""
        return self.measure.list_readings(self.run)


@dataclass(frozen=True)
class Order:
    """A published order of two runs.

    Attributes:
        better: Run that was better.
        worse: Run that was worse.
        measures: What is measured of the better and of the worse one.
        factor: The worse value is multiplied with it before they are compared.
        margin: Distance by which the better one must be ahead; below 0, by which it may be behind.
        published: The published statement in words.
        because: Why it gets no verdict; empty: it gets one.
    """

    better: str
    worse: str
    measures: tuple[Spec, Spec]
    factor: NonNegativeFloat = 1.0
    margin: Number = 0.0
    published: str = ""
    because: str = ""

    @property
    def name(self) -> str:
        """The order in words; it tells two orders of a table apart."""
        names = [spec.name for spec in self.measures]
        if names[0] == names[1]:
            text = f"{self.better} better than {self.worse}: {names[0]}"
        else:
            text = f"{self.better} ({names[0]}) better than {self.worse} ({names[1]})"
        text += f", times {self.factor:g}" if self.factor != 1 else ""
        return text + (f", by {self.margin:g}" if self.margin else "")

    @property
    def runs(self) -> list[str]:
        """All runs that are compared."""
        return list(dict.fromkeys([self.better, self.worse, *self.measures[0].runs, *self.measures[1].runs]))

    def list_readings(self) -> list[tuple[str, Spec]]:
        """Return what it reads in runs, each with its run."""
        sides = zip((self.better, self.worse), self.measures, strict=True)
        return [reading for run, measure in sides for reading in measure.list_readings(run)]


@dataclass(frozen=True)
class Table:
    """A published table with everything that is needed to run it again.

    Attributes:
        name: Name of the file without its ending.
        path: The file.
        title: Title.
        source: Where it was published.
        claim: What the table claims.
        setting: Setting of the paper.
        departures: Where ours differs.
        detects: Faults that were planted, and turned a cell or an order.
        aims_at: Faults that the table is meant to show; nobody planted them.
        cannot_detect: Faults that no cell would show.
        tuned_on_test: Whether the paper chose anything on test data.
        sets: Sets that the table belongs to.
        minutes: By set, expected minutes of its runs on two cores; :data:`ALL`: of all runs.
        data: Files that its runs need.
        extras: Optional dependencies that its runs need, by their extra.
        seeds: Seeds of every run.
        looks: Numbers of seeds at which verdicts are made, planned before the first run. The last is that of all seeds.
        unplanned: What of `looks` was not planned before the first run, in a sentence.
        tolerances: Further tolerances at which the page counts the verdicts of the cells.
        vary: Keys that are set to the seed beside `trainer.seed`; `None`: as `compare` has it.
        exact: Whether nothing in it is random: one seed is then judged as an interval of width zero.
        runs: Runs by name.
        cells: Cells, row by row.
        orders: Published orders.
        why: Why a cell, a row, a column or the table disagrees, by its name.
    """

    name: str
    path: Path
    title: str
    source: Source
    claim: str
    setting: str
    minutes: Mapping[str, float]
    runs: Mapping[str, RunSpec]
    cells: Sequence[Cell]
    orders: Sequence[Order]
    departures: Texts = field(default_factory=list)
    detects: Texts = field(default_factory=list)
    aims_at: Texts = field(default_factory=list)
    cannot_detect: Texts = field(default_factory=list)
    tuned_on_test: bool = False
    sets: Texts = field(default_factory=list)
    data: list[Data] = field(default_factory=list)
    extras: Texts = field(default_factory=list)
    seeds: Sequence[int] = (0,)
    looks: Sequence[int] = (1,)
    unplanned: str = ""
    tolerances: list[NonNegativeFloat] = field(default_factory=list)
    vary: Texts | None = None
    exact: bool = False
    why: dict[str, str] = field(default_factory=dict)

    @property
    def confidence(self) -> float:
        """Confidence of each look's intervals: all looks together err as rarely as one look at 95 % (Bonferroni)."""
        return 1 - ERROR / len(self.looks)

    def reason(self, cell: Cell) -> str:
        """Return the paragraph that says why a cell disagrees: of the cell, its row, its column or the table."""
        return next((self.why[key] for key in (cell.name, cell.row, cell.column, WHOLE) if key in self.why), "")


# -- reading -----------------------------------------------------------------------------------------------------------
def read_table(path: Path, configs: Path) -> Table:
    """Read a table.

    Args:
        path: The YAML file.
        configs: Folder that `configs` of a run are relative to, unless they lie beside the table.

    Raises:
        InputError: If something in it cannot work. The sentence names the file, the place and the way out.
    """
    top = Block(read_yaml(path), path.name, "the table")
    source, sets = top.take("source", Source), top.take("sets", Texts, [])
    runs = _read_runs(top, (path.parent, configs), sets)
    measures: dict[str, Spec] = {}
    for name, entry in top.take("measures", Names, {}).items():  # a measure may be made of those above it
        measures[name] = read_measure(entry, top, runs, measures, name)
    seeds = _read_seeds(top)
    reader = _Reader(top, runs, measures, source.read)
    cells, orders = reader.cells(), [order for block in top.take_list("orders") for order in reader.orders(block)]
    table = top.read(
        Table,
        name=path.stem,
        path=path,
        source=source,
        sets=sets,
        runs=runs,
        cells=cells,
        orders=orders,
        minutes=_read_minutes(top, sets, runs),
        seeds=seeds,
        looks=_read_looks(top, len(seeds)),
    )
    if not cells and not orders:
        raise top.error("has no cell and no order. Give rows, cells or orders.")
    for kind, names in (("cell", [cell.name for cell in cells]), ("order", [order.name for order in orders])):
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise top.error(f"has the {kind} '{twice}' twice. Give each one once.")
    for key in table.why:
        top.check_name(key, {WHOLE, *(name for cell in cells for name in (cell.name, cell.row, cell.column))}, "why")
    if not {*table.extras} <= {*EXTRAS}:
        raise top.error(f"has extras: {table.extras!r:.60}. Give some of {', '.join(EXTRAS)}.")
    used = {name for names in (*(cell.runs for cell in cells), *(order.runs for order in orders)) for name in names}
    idle = next((name for name in runs if name not in used), None)
    if idle is not None:
        raise InputError(f"{top.file}: run '{idle}' is in no cell and in no order. Take it out, or give it a cell.")
    return table


def _read_minutes(top: Block, sets: Sequence[str], runs: Mapping[str, RunSpec]) -> dict[str, float]:
    """Return the expected minutes of each set; one number is that of the table's first set, or of all runs."""
    if not isinstance(top.values.get("minutes"), Mapping):
        names = [*sets[:1], *([ALL] if all(run.sets == sets for run in runs.values()) else [])]
        return dict.fromkeys(names or [ALL], top.take("minutes", NonNegativeFloat))
    minutes: dict[str, float] = top.take("minutes", dict[str, NonNegativeFloat])
    if not minutes:
        raise top.error("has minutes: {}. Give one number, or one for each set.")
    for name in minutes:
        top.check_name(name, {ALL, *sets, *(name for run in runs.values() for name in run.sets)}, "minutes")
    return minutes


def _read_seeds(top: Block) -> list[int]:
    seeds_or_number = top.take("seeds", default=1)
    seeds = list(range(seeds_or_number)) if type(seeds_or_number) is int else seeds_or_number
    whole = isinstance(seeds, list) and all(type(seed) is int for seed in seeds)
    if not whole or not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise top.error(
            f"has seeds: {seeds_or_number!r}. Give a number of seeds (5), or a list of different ones ([0, 3])."
        )
    return seeds


def _read_looks(top: Block, seeds: int) -> list[int]:
    looks: list[int] = top.take("looks", Annotated[list[int], Length(1)], [seeds])
    if looks != sorted({*looks}) or looks[0] < 1 or looks[-1] != seeds:
        rule = f"Give rising numbers of seeds, the last of them {seeds}, the number of all seeds"
        raise top.error(f"has looks: {looks!r}. {rule} ([{max(1, seeds // 2)}, {seeds}]).")
    return looks


@dataclass(frozen=True)
class _Common:
    """What all runs of a table have."""

    configs: Texts = field(default_factory=list)
    config: Names = field(default_factory=dict)
    options: Names = field(default_factory=dict)
    test_curve: bool = False


def _read_runs(top: Block, folders: Sequence[Path], sets: list[str]) -> dict[str, RunSpec]:
    common, reduced, runs = top.take("common", _Common, _Common()), top.take("reduced", bool, False), {}
    for name, block in top.take_blocks("runs", short="configs"):
        runs[name] = run = block.read(
            RunSpec,
            name=name,
            configs=[
                find_config(block, file, folders) for file in (*common.configs, *block.take("configs", Texts, []))
            ],
            config=_merged(common.config, block.take("config", Names, {})),
            options={**common.options, **block.take("options", Names, {})},
            sets=block.take("sets", Texts, sets),
            reduced=block.take("reduced", bool, reduced),
            test_curve=block.take("test_curve", bool, common.test_curve),
        )
        if not run.configs and not run.config:
            raise block.error("has no configuration. Give configs (files), config (written here), or both.")
    return runs


def find_config(block: Block, file: str, folders: Iterable[Path]) -> Path:
    """Return the place of a configuration that a block names: beside the block's file, or among the configurations."""
    beside, configs = folders
    for folder in (beside, configs):
        if (folder / file).is_file():
            return folder / file
    raise block.error(f"names the configuration '{file}', which lies neither beside the file nor in {configs}.")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if both else value
    return out


@dataclass(frozen=True)
class _Reader:
    """Reader of cells and orders, which name runs and measures."""

    top: Block
    runs: Mapping[str, RunSpec]
    measures: Mapping[str, Spec]
    known_by: Read

    def cells(self) -> list[Cell]:
        """Return the cells of `rows` and `columns`, and those of `cells`."""
        cells = []
        columns = {name: block.values for name, block in self.top.take_blocks("columns", short="measure")}
        for row, block in self.top.take_blocks("rows"):
            run, published = block.take("run", str, row), block.take("published", Names)
            block.finish()
            for column, value in published.items():
                self.top.check_name(column, columns, f"row '{row}'")
                cell = value if isinstance(value, Mapping) else {"published": value}
                values = {"run": run, **columns[column], **cell, "row": row, "column": column}
                cells.append(self._cell(Block(values, self.top.file, "a cell")))
        return cells + [self._cell(block) for block in self.top.take_list("cells")]

    def _cell(self, block: Block) -> Cell:
        row, column = block.take("row", str), block.take("column", str)
        block.where = f"cell '{row} / {column}'"
        measure, memory = self._measure(block), self._is_memory(block)
        run = None if measure.kind == "epsilon" else block.take("run", str)
        if run is not None:
            block.check_name(run, self.runs, "run")
            if run in measure.runs:
                raise block.error(f"compares the run '{run}' with itself ({measure.name}). Name another one.")
        reduced = any(self.runs[name].reduced for name in (run, *measure.runs) if name is not None)
        because = "the number is from memory" if memory else "reduced: its order alone counts" if reduced else ""
        return block.read(Cell, row=row, column=column, run=run, measure=measure, because=because)

    def orders(self, block: Block) -> list[Order]:
        """Return an order for every pair of better and worse runs."""
        better, worse = (self._side(block, key) for key in ("better", "worse"))
        named = all(measure for _, measure in (*better, *worse))
        usual = block.take("measure", default=None) if named else self._measure(block)
        specs = [spec for spec in (usual, *(inner for _, inner in (*better, *worse))) if isinstance(spec, Spec)]
        if any(spec.kind == "epsilon" for spec in specs):
            raise block.error("is of an epsilon, which is of no run. Give cells of it.")
        because = "the order is from memory" if self._is_memory(block) else ""
        return [
            block.read(Order, better=a, worse=b, measures=(first or usual, second or usual), because=because)
            for a, first in better
            for b, second in worse
        ]

    def _side(self, block: Block, key: str) -> list[tuple[str, Spec | None]]:
        side: list[tuple[str, Spec | None]] = []
        for value in block.take(key, list[Any]):
            if isinstance(value, Mapping):
                inner = Block(value, block.file, f"{block.where}, {key}")
                side.append((inner.take("run", str), self._measure(inner)))
                inner.finish()
            else:
                side.append((str(value), None))
            block.check_name(side[-1][0], self.runs, key)
        if not side:
            raise block.error(f"has no run in '{key}'.")
        return side

    def _measure(self, block: Block) -> Spec:
        return read_measure(block.take("measure"), block, self.runs, self.measures)

    def _is_memory(self, block: Block) -> bool:
        return bool(block.take("read", Read, self.known_by) == "memory")
