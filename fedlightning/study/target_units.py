"""Errors of a regression in the units of its target, where a table's data standardise it and the module does not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedlightning.errors import join_words
from fedlightning.scores.metric_names import bare, metric_label
from fedlightning.scores.rows import Row

POWERS = {"rmse": 1, "mae": 1, "mse": 2}
"""Errors -> the power of the target's unit that they are in."""
LINEAR = ("mean", "weighted_mean", "std", "median", "worst", "tenth_percentile")


@dataclass(frozen=True)
class Target:
    """What a regression predicts.

    Attributes:
        name: Column of a table; empty where the run does not tell, as of data at sites.
        deviation: How much of the target's unit is 1 for the module; 1 where nothing is standardised.
        own_module: Whether all modules are FedLightning's `Regressor`, which logs errors in what it is given. Others may
            have undone the scale themselves.
    """

    name: str = ""
    deviation: float = 1.0
    own_module: bool = True

    def factor(self, metric: str) -> float:
        """Return what a logged metric is times, in the target's units."""
        return self.deviation ** POWERS.get(bare(metric), 0) if self.own_module else 1.0

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Return scores in the target's units."""
        return [replace(row, value=row.value * by) if (by := self.factor(row.metric)) != 1 else row for row in rows]

    def results(self, results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return rows of `summary.json` in the target's units.

        Example:
            >>> row = {"metric": "test_rmse", "mean": 0.5, "variance": 0.01, "per_client": {"a": 0.5}}
            >>> Target("days", 6.0).results([row])
            [{'metric': 'test_rmse', 'mean': 3.0, 'variance': 0.36, 'per_client': {'a': 3.0}}]
        """
        converted = []
        for row in results:
            by = self.factor(row["metric"])
            powers = dict.fromkeys(LINEAR, by) | {"variance": by * by}
            row = {name: _times(value, powers.get(name, 1.0)) for name, value in row.items()} if by != 1 else dict(row)
            per_client = {client: _times(score, by) for client, score in row["per_client"].items()}
            converted.append(row | {"per_client": per_client})
        return converted

    def in_words(self, metric: str) -> str | None:
        """Return in what units a metric is; `None` where it is not an error of a regression, or that is not known.

        Example:
            >>> Target("days", 6.0).in_words("mse")
            'MSE is in the squared units of days; metrics.csv has it in squared standard deviations (36).'
        """
        if bare(metric) not in POWERS or not self.name:
            return None
        label, squared = metric_label(bare(metric)), "squared " if POWERS[bare(metric)] == 2 else ""
        if self.own_module or self.deviation == 1:
            text, by = f"{label} is in the {squared}units of {self.name}", self.factor(metric)
            return text + (f"; metrics.csv has it in {squared}standard deviations ({by:g})." if by != 1 else ".")
        return (
            f"{self.name} is divided by {self.deviation:g} (target_statistics), and {label} is as the module logs it."
        )


def target_of(config: Mapping[str, Any]) -> Target:
    """Return what a run predicts, by its `config.yaml`."""
    table = next(_tables(config.get("data")), {})
    _, deviation = table.get("target_statistics") or (0.0, 1.0)
    return Target(table.get("target", ""), float(deviation), _is_regressor(config.get("model")))


def describe_units(targets: Iterable[Target], metric: str) -> list[str]:
    """Return in what units a metric is, in a sentence for each scale of some runs."""
    return list(dict.fromkeys(text for target in targets if (text := target.in_words(metric)) is not None))


def mixed_scales(targets: Iterable[tuple[str, Target]], metric: str) -> str | None:
    """Return a sentence where a metric of some runs, by name, is not of one target, or not on one scale.

    Example:
        >>> runs = [("A", Target("days", 6.0)), ("B", Target("days", 6.0, own_module=False))]
        >>> mixed_scales(runs, "rmse"), mixed_scales(runs, "loss")
        ('RMSE is of days in A; of days / 6 in B: give all runs the same target, target_statistics and kind of module.', None)
    """
    named, runs_by_scale = list(targets), dict[str, dict[str, None]]()
    units = {(target.name, target.deviation) for _, target in named if target.name or target.deviation != 1}
    scaled = bare(metric) in (*POWERS, "loss")
    if not scaled:  # a share of what is right has no unit, and a target
        named = [(name, Target(target.name)) for name, target in named if target.name]
    elif len(units) < 2 and all(by == 1 for _, by in units):
        return None
    for name, target in named:
        by = target.deviation / (target.factor("rmse") if bare(metric) in POWERS else 1.0)
        unit = f"{target.name}{f' / {by:g}' if by != 1 else ''}" or "a target that is not named"
        runs_by_scale.setdefault(unit, {})[name] = None
    if len(runs_by_scale) < 2:
        return None
    scales = "; ".join(f"of {unit} in {join_words(names)}" for unit, names in runs_by_scale.items())
    return f"{metric_label(bare(metric))} is {scales}: give all runs the same target, target_statistics and kind of module."


def _is_regressor(model: Any) -> bool:
    """Return whether a model section is FedLightning's regressor, or clients' models that are."""
    path, options = (model.get("class_path"), model.get("init_args")) if isinstance(model, Mapping) else ("", None)
    if str(path).startswith("fedlightning.") and str(path).endswith(".ClientModels") and isinstance(options, Mapping):
        return all(map(_is_regressor, options.get("models", {}).values()))
    return str(path).startswith("fedlightning.") and str(path).endswith(".Regressor")


def _tables(section: Any) -> Iterator[Mapping[str, Any]]:
    """Yield what has a target in a data section, whatever it is wrapped in."""
    if isinstance(section, Mapping):
        if isinstance(section.get("target"), str):
            yield section
        for value in section.values():
            yield from _tables(value)


def _times(value: Any, by: float) -> Any:
    return value * by if isinstance(value, int | float) and by != 1 else value
