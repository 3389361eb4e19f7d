"""What a published table is: its source, its runs, its cells and its orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlightning.experiments.reproduce.measures import Spec
from fedlightning.experiments.reproduce.specs import runs_of

READ = ("source", "re-run", "memory")
"""How a published number is known. From memory: it is printed, and never judged."""
ALL = "all"
"""Key of `minutes` for all runs of a table, whatever sets they are in."""
WHOLE = "table"
"""Key of `why` for the paragraph about the whole table."""


@dataclass(frozen=True)
class Source:
    """Where a table was published.

    Attributes:
        paper: Authors, title and year.
        table: Table or figure of the paper.
        link: DOI, arXiv number or address.
        read: One of :data:`READ`.
    """

    paper: str
    table: str
    link: str
    read: str


@dataclass(frozen=True)
class Data:
    """Files that a table's runs read.

    Attributes:
        name: Name of the data set.
        roots: Folders below the data root, the likeliest first; the first that holds all files is used.
        files: Files that must lie there.
        get: Where to get them, in words.
        option: Option of a run that is set to the folder.
    """

    name: str
    roots: Sequence[str]
    files: Sequence[str]
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
        differs: What differs from the published setting.
        sets: Sets that the run belongs to.
        reduced: Whether it is smaller than the published setting: its cells are judged by order only.
        test_curve: Whether the scores of each round are taken on test data, as the paper took them.
    """

    name: str
    configs: Sequence[Path]
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    differs: str
    sets: Sequence[str]
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
        judged: Whether it gets a verdict: not if it is known from memory, or its run is reduced.
        because: Why it gets none.
    """

    row: str
    column: str
    run: str | None
    measure: Spec
    published: float
    tolerance: float
    judged: bool = True
    because: str = ""

    @property
    def name(self) -> str:
        """Row and column."""
        return f"{self.row} / {self.column}"

    @property
    def runs(self) -> list[str]:
        """All runs that the number is made from."""
        return list(dict.fromkeys([*([self.run] if self.run else []), *runs_of(self.measure)]))


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
        judged: Whether it gets a verdict.
    """

    better: str
    worse: str
    measures: tuple[Spec, Spec]
    factor: float = 1.0
    margin: float = 0.0
    published: str = ""
    judged: bool = True

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
        found = [self.better, self.worse, *runs_of(self.measures[0]), *runs_of(self.measures[1])]
        return list(dict.fromkeys(found))


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
        detects: Faults that make a cell disagree.
        cannot_detect: Faults that no cell would show.
        tuned_on_test: Whether the paper chose anything on test data.
        sets: Sets that the table belongs to.
        minutes: By set, expected minutes of its runs on two cores; :data:`ALL`: of all runs.
        data: Files that its runs need.
        extras: Optional dependencies that its runs need, by their extra.
        seeds: Seeds of every run.
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
    departures: Sequence[str]
    detects: Sequence[str]
    cannot_detect: Sequence[str]
    tuned_on_test: bool
    sets: Sequence[str]
    minutes: Mapping[str, float]
    data: Sequence[Data]
    extras: Sequence[str]
    seeds: Sequence[int]
    vary: Sequence[str] | None
    exact: bool
    runs: Mapping[str, RunSpec]
    cells: Sequence[Cell]
    orders: Sequence[Order]
    why: Mapping[str, str] = field(default_factory=dict)

    def reason(self, cell: Cell) -> str:
        """Return the paragraph that says why a cell disagrees: of the cell, its row, its column or the table."""
        return next((self.why[key] for key in (cell.name, cell.row, cell.column, WHOLE) if key in self.why), "")
