"""The runs of a study and the look-ups that its tables are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedlightning.errors import join_words
from fedlightning.scores.metric_names import bare, higher_is_better
from fedlightning.study import roles
from fedlightning.study.baselines import (
    SAMPLED,
    SAMPLED_CROSSED,
    Sampling,
    fingerprint,
    odd_splits,
    sampling,
    test_share,
    why_not,
)
from fedlightning.study.columns import GLOBAL, PERSONAL
from fedlightning.study.crossing import sources_of
from fedlightning.study.finished_runs import DEPLOYED, Run
from fedlightning.study.run_scores import Estimate, RunScores, SeedScore, common_metric, estimate
from fedlightning.study.run_tables import RunTables, tables_of
from fedlightning.study.samples import Predicted, read

Table = list[dict[str, Any]]
"""Lines of a table, each with the same keys and plain values, ready for JSON, CSV and a page."""
_SPLIT_WORDS = {"train": "the training split", "val": "the validation split", "test": "the test split"}


class StudyData:
    """Runs of several methods and seeds, and the scores in them.

    :class:`fedlightning.study.study.Study` adds the tables and says what the arguments are.

    Attributes:
        runs: All runs, failed ones included, but those of leave-one-site-out.
        left_out: Runs of leave-one-site-out.
        methods: Names in the order given; baselines that `compare` added come last.
        seeds: Seeds of all runs, ascending.
        finished: (method, seed) -> scores of every run that has a result.
        odd: (method, seed) of runs on other test data than most runs of that seed -> one of those.
    """

    def __init__(
        self,
        runs: Iterable[Run],
        metric: str | None = None,
        checkpoint: str = DEPLOYED,
        confidence: float = 0.95,
        interval: str = "t",
        split: str = "test",
    ) -> None:
        all_runs = list(runs)
        self.runs = [run for run in all_runs if run.site is None]
        self.left_out = [run for run in all_runs if run.site is not None]
        if not self.runs:
            raise ValueError("There is no run to compare. Give run folders, or the --out folder of a compare.")
        self.metric = bare(metric) if metric is not None else common_metric(self.runs, split)
        self.checkpoint = checkpoint
        self.confidence = confidence
        self.interval = interval
        self.split = split
        names = dict.fromkeys(run.name for run in self.runs)
        added = {run.name for run in self.runs if run.baseline}
        self.methods = [*(name for name in names if name not in added), *(name for name in names if name in added)]
        self.seeds = sorted({run.seed for run in self.runs})
        self.finished = {(run.name, run.seed): RunScores(run) for run in self.runs if run.error is None}
        self.odd = odd_splits([scores.run for scores in self.finished.values()], split)
        self._check_metric()
        self._check_checkpoint()

    def _check_metric(self) -> None:
        metrics_by_run = [scores.metrics(self.split) for scores in self.finished.values()]
        if metrics_by_run and not any(self.metric in metrics for metrics in metrics_by_run):
            have = ", ".join(dict.fromkeys(metric for metrics in metrics_by_run for metric in metrics)) or "none"
            raise ValueError(
                f"No run has a score '{self.metric}' on {self.split} data; there is: {have}. Choose one of these, or test "
                "the runs first."
            )

    def _check_checkpoint(self) -> None:
        rows = [score.row for scores in self.finished.values() for score in scores if score.row["split"] == self.split]
        checkpoints = list(dict.fromkeys(str(row["checkpoint"]) for row in rows))
        if checkpoints and self.checkpoint not in (DEPLOYED, *checkpoints):
            raise ValueError(
                f"No run has scores of a checkpoint '{self.checkpoint}' on {self.split} data; there is: {DEPLOYED}, "
                f"{', '.join(checkpoints)}."
            )

    @cached_property
    def tables(self) -> dict[tuple[str, int], RunTables]:
        """(method, seed) -> `clusters.csv` and `ledger.csv` of every run that has a result."""
        return {key: tables_of(scores.run) for key, scores in self.finished.items()}

    @cached_property
    def samples(self) -> dict[Path | None, Predicted]:
        """Folder of a run -> predicted probabilities of test samples, of finished runs that have them."""
        runs = [run for run in (*self.runs, *self.left_out) if run.path is not None and run.error is None]
        predictions = {run.path: read(run.path) for run in runs if run.path is not None}
        return {path: predicted for path, predicted in predictions.items() if predicted is not None}

    # -- methods and seeds -----------------------------------------------------------------------------------------
    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the metric is better."""
        return higher_is_better(self.metric)

    def comparable(self, method: str) -> bool:
        """Return True if a finished run of `method` has the same test data as most runs."""
        return any(name == method and (name, seed) not in self.odd for name, seed in self.finished)

    def seeds_of(self, method: str) -> list[int]:
        """Return the seeds that a method's means are taken over: comparable ones, or all finished ones if none is."""
        done = [seed for seed in self.seeds if (method, seed) in self.finished]
        return [seed for seed in done if (method, seed) not in self.odd] or done

    @property
    def seed_text(self) -> str:
        """Return what the seeds change, in a sentence for the tables."""
        listed = ", ".join(str(seed) for seed in self.seeds)
        if len(self.seeds) == 1:
            return f"One seed ({listed}): no interval over seeds."
        changed = [words for split, words in _SPLIT_WORDS.items() if self._varies(split)]
        same = [words for split, words in _SPLIT_WORDS.items() if not self._varies(split)]
        levels, sources = self.crossed
        if sources:
            text = f"{len(self.seeds)} runs: {levels} seeds of each source, crossed ({'; '.join(sources.values())})"
        else:
            words = join_words(["the initialisation and batch order", *changed])
            text = f"{len(self.seeds)} seeds ({listed}): they change {words}"
        text += f"; {join_words(same)} {'stays' if len(same) == 1 else 'stay'} the same. " if same else ". "
        return text + (SAMPLED_CROSSED if sources else SAMPLED[self.sampling])

    def _varies(self, split: str) -> bool:
        """Return True if `split` differs between seeds of any method."""
        return any(
            len({fingerprint(self.finished[method, seed].run, split) for seed in self.seeds_of(method)}) > 1
            for method in self.methods
        )

    # -- baselines -------------------------------------------------------------------------------------------------
    @cached_property
    def baselines(self) -> dict[str, str]:
        """Baseline role (`siloed`, `fedavg`, `finetuned`, `central`) -> the method that plays it, where there is one.

        Of several methods with one role, the one that is comparable with the most runs is taken, then the first.
        """
        chosen: dict[str, str] = {}
        for role in roles.ROLES:
            candidates = [name for name in self.methods if self._plays(name) == role]
            if candidates:
                chosen[role] = max(candidates, key=self._partners)
        return chosen

    def role(self, method: str) -> str | None:
        """Return the baseline role that `method` was chosen for, or `None`."""
        return next((role for role, name in self.baselines.items() if name == method), None)

    def comparable_seeds(self, method: str, *others: str) -> list[int]:
        """Return the seeds at which `method` and every one of `others` have comparable runs."""
        return [
            seed
            for seed in self.seeds_of(method)
            if all(
                (name, seed) in self.finished
                and why_not(self.finished[method, seed].run, self.finished[name, seed].run) is None
                for name in others
            )
        ]

    def siloed_scores(self) -> dict[int, SeedScore]:
        """Return, by seed, the scores of each client's siloed model on its own data."""
        return self.deployed(self.baselines["siloed"]) if "siloed" in self.baselines else {}

    def federated_scores(self) -> dict[int, SeedScore]:
        """Return, by seed, the scores of FedAvg's global model on each client's data."""
        return self.shared(self.baselines["fedavg"]) if "fedavg" in self.baselines else {}

    def _plays(self, method: str) -> str | None:
        """Return the role of a method if all of its finished runs have the same one."""
        names = {roles.role(self.finished[method, seed].run) for seed in self.seeds_of(method)}
        return names.pop() if len(names) == 1 else None

    def _partners(self, baseline: str) -> int:
        return sum(len(self.comparable_seeds(name, baseline)) for name in self.methods if name != baseline)

    # -- scores ----------------------------------------------------------------------------------------------------
    def find(
        self, method: str, metric: str | None = None, every_seed: bool = False, **where: Any
    ) -> dict[int, SeedScore]:
        """Return, by seed, one row of each run of a method that has it."""
        where = {"split": self.split} | where
        seeds = self.seeds if every_seed else self.seeds_of(method)
        scores = {}
        for seed in seeds:
            if (method, seed) in self.finished:
                score = self.finished[method, seed].find(metric or self.metric, **where)
                if score is not None:
                    scores[seed] = score
        return scores

    def deployed(self, method: str, every_seed: bool = False, **where: Any) -> dict[int, SeedScore]:
        """Return, by seed, the scores of the models that clients would use, by the checkpoint rule of the study."""
        for model in (PERSONAL, GLOBAL):
            scores = self.find(method, every_seed=every_seed, model=model, checkpoint=self.checkpoint, **where)
            if scores or self.checkpoint == DEPLOYED:
                return scores
        return {}

    def shared(self, method: str, **where: Any) -> dict[int, SeedScore]:
        """Return, by seed, the scores of the global model.

        This is `best_global` where a run has it, unless the checkpoint rule of the study is `"latest"`.
        """
        rule = "latest" if self.checkpoint == "latest" else DEPLOYED
        return self.find(method, model=GLOBAL, checkpoint=rule, **where)

    def estimate(self, values: Sequence[float | None], metric: str | None = None) -> Estimate:
        """Return the mean over seeds and its interval, at the study's confidence; `metric`: what the values are of.

        Of crossed seeds there is no interval unless every run has a value.
        """
        whole = len(values) == self.grid_size
        levels = self.crossed[0] if whole else 0
        interval = estimate(values, self.confidence, self.interval, self.test_share, metric, levels)
        return interval if whole or not self.grid_size else replace(interval, ci95=None)

    # -- what seeds vary -------------------------------------------------------------------------------------------
    @cached_property
    def crossed(self) -> tuple[int, dict[int, str]]:
        """Values of each source where seeds are crossed, and the sources by the digits of runs' numbers; else 0 and none."""
        return sources_of(self.runs[0].vary)

    @property
    def grid_size(self) -> int:
        """Runs of a method where seeds are crossed; 0 where they are not."""
        levels, sources = self.crossed
        return levels ** len(sources) if sources else 0

    @cached_property
    def sampling(self) -> Sampling:
        """Whether seeds change training only, the split, or the fold that is tested."""
        return sampling([scores.run for key, scores in self.finished.items() if key not in self.odd], self.split)

    @cached_property
    def test_share(self) -> float:
        """Samples tested for each trained on, over all runs; 0 where seeds' test sets do not overlap."""
        runs = [scores.run for key, scores in self.finished.items() if key not in self.odd]
        return test_share(runs, self.split) if self.sampling == "splits" else 0.0
