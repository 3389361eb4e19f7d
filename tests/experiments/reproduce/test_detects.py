"""What a table says that it detects is planted, and turns a cell or an order that agreed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlightning.callbacks import SCAFFOLD, Ditto, FedExLoRA, flexlora
from fedlightning.callbacks.shared import spending
from fedlightning.cli import main
from fedlightning.commands.reproduce import find_tables
from fedlightning.commands.study_options import CLI
from fedlightning.experiments.reproduce.published_tables import Table
from fedlightning.experiments.reproduce.results import BAD, GOOD, Place, TableRun, measure_table
from fedlightning.experiments.reproduce.table_runs import plan_runs
from fedlightning.tensors import add

Patch = pytest.MonkeyPatch
TABLES = {table.name: table for table in find_tables([])}


# -- wrong code --------------------------------------------------------------------------------------------------------
def swap_control_variates(patch: Patch) -> None:
    right = SCAFFOLD.correct_gradient
    patch.setattr(SCAFFOLD, "correct_gradient", lambda *given: 2 * given[-1] - right(*given))


def mean_over_participants(patch: Patch) -> None:
    """`c` becomes the mean over a round's participants, as if the absent ones had sent zeros nowhere."""

    def on_reduced(self: Any, server: Any, state: Any) -> Any:
        own = server.state.get(self.key, {})
        if "sum" in own:
            share = next(iter(server.num_samples.values())) if self.weighting == "samples" else 1.0
            server.state[self.key] = {"c": add(own["c"], own["sum"], alpha=1.0 / share)}
        return state

    patch.setattr(SCAFFOLD, "on_reduced", on_reduced)


def pull_to_zero(patch: Patch) -> None:
    right = Ditto.correct_gradient

    def correct_gradient(self: Any, ctx: Any, name: str, parameter: Any, gradient: Any) -> Any:
        anchored = right(self, ctx, name, parameter, gradient)
        return gradient + self.lam * parameter if anchored is not gradient else gradient

    patch.setattr(Ditto, "correct_gradient", correct_gradient)


def negate_residual(patch: Patch) -> None:
    right = FedExLoRA.merge

    def merge(self: Any, server: Any, changes: Any) -> Any:
        return right(self, server, {path: (-left, rows) for path, (left, rows) in changes.items()})

    patch.setattr(FedExLoRA, "merge", merge)


def square_singular_values(patch: Patch) -> None:
    right = flexlora.singular_factors

    def wrong(left: Any, rows: Any, rank: int) -> Any:
        a, b = right(left, rows, rank)
        return a * a.norm(dim=0), b

    patch.setattr(flexlora, "singular_factors", wrong)


def counted_otherwise(change: Callable[[float, float, int], tuple[float, float, int]]) -> Callable[[Patch], None]:
    """Return a patch of what is counted as spent: noise, rate and number of steps."""

    def plant(patch: Patch) -> None:
        right = spending.spent_by

        def wrong(accountant: str, delta: float, history: Any, orders: Any = ()) -> float:
            return right(accountant, delta, tuple(change(*steps) for steps in history), orders)

        patch.setattr(spending, "spent_by", wrong)

    return plant


def older_conversion(patch: Patch) -> None:
    """The bound of Mironov (2017), which newer ones are below."""
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp")

    def older(*, orders: Any, rdp: Any, delta: float) -> tuple[float, float]:
        return min((value - math.log(delta) / (order - 1), order) for order, value in zip(orders, rdp, strict=True))

    patch.setattr(rdp, "get_privacy_spent", older)
    patch.setattr(spending, "spent_by", spending.spent_by.__wrapped__)  # what was computed before is kept


CALLBACK = "trainer.callbacks"
PRIVATE = ["client_dp", "sample_dp"]
SCALED = {"class_path": "fedlightning.callbacks.FedAvgM", "init_args": {"beta": 0.0, "server_lr": 0.5}}
PLANTED: dict[str, list[tuple[str, Sequence[str], Mapping[str, Any] | Callable[[Patch], None]]]] = {
    "closed_forms": [
        ("a missing or wrong weight of the mean", ["fedavg"], {"weighting": "uniform"}),
        ("FedNova without its normalisation", ["fednova"], {"": "FedAvg"}),
        ("control variates of a wrong sign or scale", ["scaffold_1"], swap_control_variates),
        ("control variates of absent clients left out of c", ["scaffold_sampled"], mean_over_participants),
        ("a personal term towards the wrong model", ["ditto_weak"], pull_to_zero),
        ("a wrong count of local steps", ["fedavg"], {"trainer.local_epochs": 2}),
        ("a proximal term that is missing", ["fedprox"], {"mu": 0.0}),
        ("a server optimizer without its first moment", ["fedadam"], {"beta1": 0.0}),
        ("a wrong server learning rate", ["fedadam"], {"server_lr": 0.15}),
        ("a loss to the wrong power in q-FedAvg", ["qfedavg"], {"q": 1.0}),
        ("shares of AFL that do not move", ["afl"], {"gamma": 0.0}),
        ("the two models of APFL mixed the wrong way round", ["apfl"], {"alpha": 0.75}),
    ],
    "fenda_appendix_h": [
        ("a server optimizer without its first moment", ["fedadam"], {"beta1": 0.0}),
        ("a wrong server learning rate", ["fedadam"], {"server_lr": 0.3}),
        ("a bias correction that the rule does not have", ["fedadam"], {"bias_correction": True}),
    ],
    "dp_noise": [
        ("noise that a run does not really add", PRIVATE, {"noise_multiplier": 10.0}),
        ("noise of a wrong scale", PRIVATE, {"clip": 0.8}),
        ("a wrong denominator of a private mean", ["client_dp"], {"rate": 0.4}),
    ],
    "accounting_dpsgd": [
        ("a wrong sampling rate", [], counted_otherwise(lambda z, q, n: (z, 1.1 * q, n))),
        ("steps that are counted as rounds", [], counted_otherwise(lambda z, q, n: (z, q, n // 6))),
        ("a wrong conversion from Rényi orders to an epsilon", [], older_conversion),
    ],
    "accounting_mcmahan2018": [
        ("a wrong sampling rate", [], counted_otherwise(lambda z, q, n: (z, 1.1 * q, n))),
        ("noise that is divided by the wrong number", [], counted_otherwise(lambda z, q, n: (1.1 * z, q, n))),
        ("a wrong conversion from Rényi orders to an epsilon", [], older_conversion),
    ],
    "lora_aggregation": [
        ("factors that are averaged where products should be", ["flora"], {"": "FedIT"}),
        ("equal weights", ["fedit"], {"weighting": "uniform"}),
        ("a residual of the wrong sign", ["fedexlora"], negate_residual),
        ("a wrong scale", ["fedexlora"], {"alpha": 4}),
        ("singular values that are divided wrongly", ["flexlora"], square_singular_values),
    ],
    "pi_fl_theory": [("weights of the mean that do not sum to 1", ["alone"], {"": SCALED})],
}
"""Table -> the faults that it says it sees, each with runs that show it, and options of the callback or wrong code."""
SEEDS = {"dp_noise": (0, 1, 2)}


def make_runs(table: Table, names: Sequence[str], seeds: Sequence[int], folder: Path) -> dict[str, dict[int, Place]]:
    """Make runs of a table in this process, where code may be patched, and return where they lie."""
    asked = TableRun(table, names, seeds)
    (methods,) = plan_runs([asked], str(folder), CLI)
    places: dict[str, dict[int, Place]] = {}
    for name, method in methods.items():
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(method.config, sort_keys=False))
        for seed in seeds:
            place = [f"--trainer.default_root_dir={folder}", f"--trainer.name={name}", f"--trainer.version=seed_{seed}"]
            varied = [f"--{key}={seed}" for key in method.vary]
            assert main(["fit", "--config", str(config), "--trainer.enable_progress_bar=false", *varied, *place]) == 0
            places.setdefault(name, {})[seed] = Place(str(folder / name / f"seed_{seed}"))
    return places


def judged(table: Table, names: Sequence[str], seeds: Sequence[int], folder: Path) -> dict[str, str]:
    """Return the verdicts of all lines that need these runs alone."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = measure_table(table, make_runs(table, names, seeds, folder) if names else {}, seeds)
    return {line.name: line.verdict.word for line in lines if line.asked}


def with_options(table: Table, names: Sequence[str], options: Mapping[str, Any]) -> Table:
    """Return the table with other options of some runs; short names are those of the callback."""
    whole = {name if "." in name else f"{CALLBACK}.{name}".rstrip("."): value for name, value in options.items()}
    runs = {name: replace(table.runs[name], options={**table.runs[name].options, **whole}) for name in names}
    return replace(table, runs={**table.runs, **runs})


def test_a_table_claims_what_is_planted():
    claimed = {name: table.detects for name, table in TABLES.items() if table.detects}
    assert claimed == {name: [text for text, _, _ in faults] for name, faults in PLANTED.items()}


FAULTS = [(name, *fault) for name, faults in PLANTED.items() for fault in faults]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "runs", "fault"), FAULTS, ids=[f"{name}: {text}" for name, text, *_ in FAULTS]
)
def test_a_planted_fault_turns_a_line(name, text, runs, fault, tmp_path, monkeypatch):
    table, seeds = TABLES[name], SEEDS.get(name, (0,))
    for extra, package in {"privacy": "opacus", "lora": "peft"}.items():
        if extra in table.extras:
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    right = judged(table, runs, seeds, tmp_path / "right")
    if callable(fault):
        fault(monkeypatch)
    else:
        table = with_options(table, runs, fault)
    wrong = judged(table, runs, seeds, tmp_path / "wrong")
    assert [line for line, word in right.items() if word in GOOD and wrong[line] in BAD], (right, wrong)
