"""Table 1 of PI-FL: every cluster's model on every group's hold-out data, beside FedSoft and FedAvg on the true groups.

    python examples/pi_fl_table1.py [--config configs/pi_fl/table1_reduced.yaml ...] [--seeds 0 1 2] [--out runs/pi_fl_table1]
        [--data.source.root=data] [--data.mixture=30:70] [any other option of `fedlightning fit`]

Khan et al., "PI-FL: personalized and incentivized federated learning", 2023. The scale of the table is the gap: the accuracy of
a centre on its own group less that on the other group, mean of the two centres. The most that clustering these clients can give is the gap
between two FedAvg models, each trained by the clients that have most of their data from one group.

All train for the same rounds and epochs from the same seeds. PI-FL and FedSoft have two settings each to choose from. The first seed's
validation data choose, by the mean accuracy of every client's favourite centre; test data are not looked at.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlightning.commands.run import Commands  # first: fedlightning before lightning

# isort: split
import numpy as np

from fedlightning.callbacks.shared.memberships import Clusters
from fedlightning.study.centres import score_centres

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
CANDIDATES: dict[str, dict[str, list[str]]] = {
    "PI-FL": {
        f"importance {kind}": [f"--trainer.callbacks.importance={kind}"]  # on the configuration's own PIFL
        for kind in ("accuracy", "matching")
    },
    "FedSoft": {
        f"lam {lam}": [f"--config={CONFIGS / 'algorithms/fedsoft.yaml'}", f"--trainer.callbacks.lam={lam}"]
        for lam in (0.01, 0.1)  # the authors' values, for CIFAR-10 and for letters
    },
}
FEDAVG = f"--config={CONFIGS / 'algorithms/fedavg.yaml'}"
REFERENCE = "FedAvg on the true groups"


class Found:
    """What one run gave.

    Attributes:
        table: Accuracy of centre c (column) on group theta (row), `(groups, groups)`; centre c is the one matched to group c.
        at_home: Share of clients whose favourite centre is that of the group that most of their data come from.
        validation: Mean validation accuracy of the clients' favourite centres.
    """

    def __init__(self, table: np.ndarray, at_home: float = 1.0, validation: float = np.nan) -> None:
        self.table, self.at_home, self.validation = table, at_home, validation

    @property
    def gaps(self) -> np.ndarray:
        """Each centre's accuracy on its own group less its mean accuracy on the others."""
        others = (self.table.sum(0) - self.table.diagonal()) / (len(self.table) - 1)
        return self.table.diagonal() - others


def fit(words: Sequence[str], data: Any = None) -> tuple[Any, Any]:
    """Carry out `fedlightning fit` with these words, and return the trainer and the data.

    Args:
        words: Words of the command line.
        data: The data of an earlier call with the same `data` options, which are not read again.
    """
    cli = Commands("fit", list(words))
    data = cli.datamodule if data is None else data
    cli.trainer.fit(cli.model, data)
    return cli.trainer, data


def centres(trainer: Any, data: Any) -> Found:
    """Score the centres of a method that makes clusters."""
    rows = score_centres(trainer, data)
    if len(rows) != data.num_groups**2:
        raise SystemExit(f"Table 1 needs as many centres as groups ({data.num_groups}); set num_clusters.")
    home = {row["group"]: row["model"] for row in rows if row["matched"]}
    table = np.array(
        [
            [row["value"] for c in home.values() for row in rows if (row["model"], row["group"]) == (c, group)]
            for group in home
        ]
    )
    method = next(callback for callback in trainer.server.callbacks if isinstance(callback, Clusters))
    shares = method.memberships(trainer.server)
    groups = dict(zip(data.client_ids, data.client_shares.argmax(1), strict=True))
    at_home = np.mean([max(shares[c], key=shares[c].__getitem__) == home[groups[c]] for c in shares])
    (validation,) = (
        row["mean"]
        for row in trainer.results
        if (row["stage"], row["split"], row["data"], row["metric"], row["checkpoint"])
        == ("G", "val", "local", "val_accuracy", "latest")
    )
    return Found(table, float(at_home), validation)


def reference(words: Sequence[str], data: Any) -> Found:
    """Train a FedAvg model for each group, by the clients that have most of their data from it."""
    groups = data.client_shares.argmax(1)
    columns = []
    for group in range(data.num_groups):
        others = [client for client, own in zip(data.client_ids, groups, strict=True) if own != group]
        trainer, _ = fit([*words, FEDAVG, f"--trainer.held_out={others}"], data)
        columns.append([row["value"] for row in score_centres(trainer, data)])
    return Found(np.array(columns).T)


def print_table(found: dict[str, list[Found]], chosen: dict[str, str]) -> None:
    """Print means over the seeds in the form of the paper, then gaps and their ratio to the reference.

    Args:
        found: What each seed gave, by method.
        chosen: The setting of each method.
    """
    groups = len(found[REFERENCE][0].table)
    print(f"{'':12}" + "".join(f"{name:^{10 * groups}}" for name in found))
    print(f"{'':12}" + "".join(f"{f'c{c}':>8}  " for _ in found for c in range(groups)))
    tables = {name: np.mean([run.table for run in runs], axis=0) for name, runs in found.items()}
    for group in range(groups):
        values = (value for table in tables.values() for value in table[group])
        print(f"{f'theta_{group}':12}" + "".join(f"{100 * value:8.1f}  " for value in values))
    print(f"{'gap':12}" + "".join(f"{100 * g:8.1f}  " for runs in found.values() for g in np.mean([r.gaps for r in runs], 0)))
    most = np.array([run.gaps.mean() for run in found[REFERENCE]])
    for name, runs in found.items():
        gaps = np.array([run.gaps.mean() for run in runs])
        if name != REFERENCE:
            print(
                f"{name} ({chosen[name]}): gap {100 * gaps.mean():.1f}, {gaps.mean() / most.mean():.2f} of that of {REFERENCE} "
                f"(seeds: {', '.join(f'{ratio:.2f}' for ratio in gaps / most)}); clients with the centre of their group: "
                f"{', '.join(f'{run.at_home:.0%}' for run in runs)}"
            )


def main() -> None:
    """Choose settings on the first seed, train everything on every seed, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", help="files, stacked")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pi_fl_table1"), help="folder of the runs and of table1.csv")
    args, more = parser.parse_known_args()
    files = args.config or [str(CONFIGS / "pi_fl/table1_reduced.yaml")]
    shown = [f"--trainer.default_root_dir={args.out}", "--trainer.enable_progress_bar=false", "--trainer.logger=false"]
    base = [*(f"--config={file}" for file in files), *shown]
    chosen: dict[str, str] = {}
    found: dict[str, list[Found]] = {name: [] for name in (*CANDIDATES, REFERENCE)}
    data = None
    for seed in args.seeds:
        # last the user's words; the method's before them, so that they hold for every method
        last = [*more, f"--trainer.seed={seed}"]
        for method, settings in CANDIDATES.items():
            tried = {}
            for setting, words in settings.items():
                if chosen.get(method, setting) == setting:
                    trainer, data = fit([*base, *words, *last], data)
                    tried[setting] = centres(trainer, data)
                    best = tried[setting]
                    print(
                        f"seed {seed}, {method}, {setting}: validation {best.validation:.3f}, gap {100 * best.gaps.mean():.1f}",
                        flush=True,
                    )
            chosen.setdefault(method, max(tried, key=lambda setting: tried[setting].validation))
            found[method].append(tried[chosen[method]])
        found[REFERENCE].append(reference([*base, *last], data))
    print_table(found, chosen)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "table1.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "setting", "seed", "group", "centre", "accuracy"])
        for name, runs in found.items():
            for seed, run in zip(args.seeds, runs, strict=True):
                for (group, centre), value in np.ndenumerate(run.table):
                    writer.writerow([name, chosen.get(name, ""), seed, group, centre, value])


if __name__ == "__main__":
    main()
