"""Leave-one-site-out in one process, for trainers that are at hand; `fedlightning compare` makes it from files."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from lightning.pytorch import LightningModule

from fedlightning.arguments import federated_data
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.options import Flower
from fedlightning.study import predicted, samples
from fedlightning.study.columns import FEWEST_SITES
from fedlightning.study.finished_runs import Run
from fedlightning.study.study import Study
from fedlightning.study.subgroups import check_subgroups
from fedlightning.trainer import FederatedTrainer


def leave_one_site_out(
    methods: Mapping[str, FederatedTrainer],
    model: LightningModule,
    datamodule: FederatedDataModule,
    columns: Sequence[str] = (),
    metric: str | None = None,
) -> Study:
    """Train every method with all sites, and again without each; return the study of all runs.

    Its tables are `external()` (scores at sites never seen), `calibrations()` and `subgroups()`.

    Args:
        methods: Name -> a trainer, which is left as it is; every run has a copy of it. Trainers of several seeds are given in
            calls of their own.
        model: The module, as for `fit`.
        datamodule: The data, with three clients or more.
        columns: Subgroups, each a column of the data, or one of numbers and where it is cut (`"age>=65"`).
        metric: Score to compare; `None` chooses as `Study` does.

    Raises:
        ValueError: If there are fewer than three clients, they are elsewhere or held out already, or a column is not there.

    Example:
        >>> from fedlightning import FederatedTrainer
        >>> from fedlightning.study.left_out import leave_one_site_out
        >>> leave_one_site_out({"fedavg": FederatedTrainer(held_out=["a"])}, None, None)
        Traceback (most recent call last):
        ValueError: The trainer of 'fedavg' sets held_out. Leave it out: each site is held out once.
    """
    for name, trainer in methods.items():
        if trainer.arguments["held_out"]:
            raise ValueError(f"The trainer of {name!r} sets held_out. Leave it out: each site is held out once.")
        if isinstance(trainer.arguments["engine"], Flower):
            raise ValueError(
                f"The trainer of {name!r} has engine='flower': predictions of single test samples do not leave sites. Hold a "
                "site out with held_out: it sends its scores."
            )
    data = federated_data(datamodule, None, None, None)
    data.prepare_data()
    data.setup("fit")
    if len(data.client_ids) < FEWEST_SITES:
        raise ValueError(f"The data have {len(data.client_ids)} clients; leaving one out takes {FEWEST_SITES} or more.")
    check_subgroups(data, columns)
    runs = []
    for name, trainer in methods.items():
        for site in (None, *data.client_ids):
            runs.append(_run(name, trainer, site, model, data, columns))
    return Study(runs, metric=metric)


def _run(
    name: str,
    trainer: FederatedTrainer,
    site: str | None,
    model: LightningModule,
    data: FederatedDataModule,
    columns: Sequence[str],
) -> Run:
    arguments = {**trainer.arguments, "callbacks": copy.deepcopy(trainer.arguments["callbacks"])}
    if site is not None:
        arguments |= {"held_out": [site], "name": f"{trainer.arguments['name']}.without.{site}"}
    fold_trainer = FederatedTrainer(**arguments)
    fold_trainer.fit(model, data)
    fold_trainer.test(verbose=False)
    probabilities = predicted.predict_samples(
        fold_trainer, data, list(data.client_ids) if site is None else [site], columns
    )
    path = None if fold_trainer.run is None else fold_trainer.run.path
    if path is not None:
        samples.write(path, probabilities)
    return Run(name, int(fold_trainer.summary["seed"]), path, dict(fold_trainer.summary), site=site)
