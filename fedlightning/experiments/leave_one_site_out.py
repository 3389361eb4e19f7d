"""Leave-one-site-out: every method again without each site, and the predictions that its report is made of."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fedlightning.config.input_errors import InputError
from fedlightning.config.short_forms import engine_of
from fedlightning.config.value_checks import class_of
from fedlightning.experiments.methods import Method, tidy, unique
from fedlightning.options import Flower
from fedlightning.study.columns import FEWEST_SITES, LOCAL


def without_each_site(method: Method, names: Iterable[str]) -> list[Method]:
    """Return a method once for each of its sites, which is kept out of training and scored on its test data.

    One that has no model for a site that never trained is not there.

    Args:
        method: The method that all sites train.
        names: Names that others have.

    Raises:
        InputError: If there are fewer than three sites, they are elsewhere, or clients are held out already.
    """
    if method.no_model is not None:
        return []
    if len(method.clients) < FEWEST_SITES:
        raise InputError(
            f"--leave-one-site-out: {method.name} has {len(method.clients)} sites; it takes {FEWEST_SITES} or more, "
            "so that a federation is left when one is out."
        )
    if engine_of(method.config["trainer"]) is Flower:
        raise InputError(
            "--leave-one-site-out reads predictions of single test samples, which do not leave the sites of "
            f"{method.name} (engine: flower). Hold a site out of a run with trainer.held_out: it sends its scores."
        )
    if method.config["trainer"].get("held_out"):
        raise InputError(
            f"--leave-one-site-out holds each site out once, but {method.name} sets trainer.held_out. Leave one of "
            "the two out."
        )
    without: list[Method] = []
    for site in method.clients:
        config = copy.deepcopy(method.config)
        config["trainer"]["held_out"] = [site]
        config["trainer"]["evaluation"]["test_data"] = [LOCAL]
        used = {name.lower() for name in (*names, *(other.name for other in without))}
        name = unique(tidy(f"{method.name}.without.{site}"), used)
        without.append(replace(method, name=name, config=config, left_out=(method.name, site)))
    return without


def predict_runs(cli: str, folders: Sequence[Path], columns: Sequence[str], checkpoint: str) -> list[str]:
    """Write the predictions of finished runs into their folders; return in sentences why some have none.

    Args:
        cli: Class of the command line that parses the options of a run, by its import path.
        folders: Folders of runs. One that has such predictions keeps them.
        columns: Columns of the data that subgroups are made of.
        checkpoint: Models of the sites that trained.
    """
    from fedlightning.arguments import federated_data
    from fedlightning.compat.lightning_runs import quiet
    from fedlightning.study import predicted, samples

    missing = []
    for folder in folders:
        before = samples.read(folder)  # a run that is made anew has an empty folder
        same = before is not None and before.checkpoint == checkpoint
        if before is not None and same and (before.reason or set(columns) <= set(before.columns)):
            continue
        run = class_of(cli)("predict", ["--config", str(folder / "config.yaml"), "--run", str(folder)])
        with quiet():
            run.trainer.restore(run.model, run.datamodule, folder)
        data = federated_data(run.datamodule, None, None, None)
        server = run.trainer.server
        assert server is not None
        predicted_now = predicted.predict_samples(
            run.trainer, data, server.held_out or server.clients, columns, checkpoint
        )
        samples.write(folder, predicted_now)
        if predicted_now.reason:
            missing.append(predicted_now.reason)
    return list(dict.fromkeys(missing))
