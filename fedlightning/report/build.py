"""Builds `report.html`, `figures/`, `comparison.json` and `comparison.csv` from finished runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlightning.errors import count_of, warn
from fedlightning.report.context import Context
from fedlightning.report.html import Page, Section, Trouble, render, slug
from fedlightning.report.sections import (
    architectures,
    clients,
    clusters,
    external,
    failures,
    fairness,
    grid,
    layer_quantities,
    leakage,
    privacy,
    scores,
    setting,
    statistics,
    terms,
    time,
    tokens,
    training,
    unseen,
)
from fedlightning.report.sentences import answers
from fedlightning.report.styles import styles
from fedlightning.scores.metric_names import metric_label
from fedlightning.study.comparison_files import write_comparison
from fedlightning.study.finished_runs import DEPLOYED, STUDY_FILE, load_study, read_study_file
from fedlightning.study.problems import Problem
from fedlightning.study.run_scores import common_metric
from fedlightning.study.run_tables import tables_of
from fedlightning.study.study import Study

REPORT_FILE = "report.html"


def build_report(
    out: Path, runs: Sequence[Path], *, metric: str | None = None, checkpoint: str = DEPLOYED, title: str | None = None
) -> Path:
    """Write a report that opens offline. The same runs give the same bytes."""
    if not runs:
        raise ValueError("There is no run to report. Give run folders, or the --out folder of a compare.")
    runs_by_study = {name: load_study(paths) for name, paths in _groups(runs).items()}
    loaded = [run for group in runs_by_study.values() for run in group]
    for fault in (fault for run in loaded if run.error is None for fault in tables_of(run).faults.values()):
        warn(fault)
    metric = metric or common_metric(loaded)
    studies = {name: Study(group, metric=metric, checkpoint=checkpoint) for name, group in runs_by_study.items()}
    out = Path(out)
    write_comparison(next(iter(studies.values())) if len(studies) == 1 else studies, out)
    page = make_page(studies, out / "figures", title or _title(studies), _about(runs))
    path = out / REPORT_FILE
    path.write_text(render(page), encoding="utf-8")
    return path


def _title(studies: Mapping[str, Study]) -> str | None:
    """Return a title from the name of the folder of a comparison, where somebody has chosen one."""
    name, study = next(iter(studies.items()))
    if len(studies) > 1 or not name or name.startswith(("compare_", "runs")):
        return None
    return f"{name}: {_metric_of(study)} of {count_of(study.data.methods, 'method')} on {_data_name(study)}"


def _metric_of(study: Study) -> str:
    return metric_label(study.data.metric)


def make_page(
    studies: Mapping[str, Study],
    figures: Path | None = None,
    title: str | None = None,
    about: Mapping[str, Mapping[str, Any]] | None = None,
) -> Page:
    """Draw the figures and return the page of one or several studies."""
    look = styles(
        (method for study in studies.values() for method in study.data.methods),
        (run.name for study in studies.values() for run in study.data.runs if run.baseline),
    )
    several = len(studies) > 1
    contexts: list[Context] = []
    for name, study in studies.items():
        prefix = slug(name, [context.prefix for context in contexts]) if several else ""
        contexts.append(Context(study, look, figures, name if several else "", prefix, 3 if several else 2))
    sections: list[Section] = []
    if several:
        sections += _drop_empty([statistics.rank_section(Context(contexts[0].study, look, figures), studies)])
    for context, name in zip(contexts, studies, strict=True):
        if several:
            sections.append(Section(f"study-{context.prefix}", name, name, _facts_line(context.study)))
        sections += _drop_empty(part(context) for part in PARTS)
        settings = (about or {}).get(name, {})
        sections += _drop_empty([setting.variance(context), setting.made(context, settings)])
    first = next(iter(studies.values()))
    word = _metric_of(first)
    methods = list(dict.fromkeys(method for study in studies.values() for method in study.data.methods))
    return Page(
        title=title
        or (
            f"{', '.join(studies)}: {word}"
            if several
            else f"{_data_name(first)}: {word} of {methods[0] if len(methods) == 1 else count_of(methods, 'method')}"
        ),
        kicker="Report of one federated method" if len(methods) == 1 else Page.kicker,
        subtitle=f"{len(studies)} data sets, {count_of(methods, 'method')}" if several else _facts_line(first),
        answers={context.name: answers(context) for context in contexts},
        problems=[trouble for context in contexts for trouble in _troubles(context, "problem")],
        notes=[trouble for context in contexts for trouble in _troubles(context, "note")],
        sections=sections,
        styles=look,
    )


PARTS = (
    grid.grid,
    scores.overview,
    statistics.differences,
    clients.clients,
    architectures.architectures,
    clusters.clusters,
    unseen.unseen,
    external.external,
    fairness.fairness,
    tokens.tokens,
    scores.measured,
    scores.stages,
    scores.checkpoints,
    clients.matrices,
    training.learning_curves,
    training.costs,
    time.time,
    terms.terms,
    setting.partition,
    layer_quantities.layers,
    privacy.privacy,
    leakage.leakage,
    failures.failures,
)
"""The sections of a study, in the order of the page."""


def _groups(runs: Sequence[Path]) -> dict[str, list[Path]]:
    """Group folders by data set: each study folder alone, single runs together."""
    groups: dict[str, list[Path]] = {}
    single: list[Path] = []
    for path in map(Path, runs):
        if not (path / STUDY_FILE).exists():
            single.append(path)
            continue
        base = path.resolve().name
        name, number = base, 2
        while name in groups:
            name, number = f"{base} ({number})", number + 1
        groups[name] = [path]
    if single:
        groups["runs" if groups else ""] = single
    return groups


def _about(runs: Sequence[Path]) -> dict[str, dict[str, Any]]:
    return {
        name: read_study_file(paths[0] / STUDY_FILE) if (paths[0] / STUDY_FILE).exists() else {}
        for name, paths in _groups(runs).items()
    }


def _troubles(context: Context, severity: str) -> list[Trouble]:
    """Return the problems of one severity in the order they were found; a problem of several methods is told once."""
    problems_by_text: dict[str, list[Problem]] = {}
    for problem in context.study.problems:
        if problem.severity == severity:
            tail = problem.text.removeprefix(f"{problem.run} ")  # the same for all methods that share the problem
            problems_by_text.setdefault(tail, []).append(problem)
    texts: dict[tuple[str | None, ...], list[str]] = {}
    for tail, problems in problems_by_text.items():
        text = problems[0].text if len(problems) == 1 else f"They {tail}" if tail[:1].islower() else tail
        texts.setdefault(tuple(dict.fromkeys(problem.run for problem in problems)), []).append(text)
    where = f"{context.name}: " if context.name else ""
    return [
        Trouble(
            where + ", ".join(method or "all runs" for method in runs),
            runs[0] if len(runs) == 1 else None,
            texts_of_problem,
        )
        for runs, texts_of_problem in texts.items()
    ]


def _drop_empty(sections: Iterable[Section | None]) -> list[Section]:
    return [section for section in sections if section is not None]


OWN_LOADERS = {"LoaderDataModule": "Own loaders", "Partitioned": "Own datasets"}
"""What a page calls data that came as loaders, or as datasets."""


def _data_name(study: Study) -> str:
    files = [((run.config.get("data") or {}).get("init_args") or {}).get("path") for run in study.data.runs]
    if study.data.runs and all(isinstance(file, str) for file in files):
        return ", ".join(dict.fromkeys(Path(file).name for file in files if file))
    names = dict.fromkeys(run.summary["data"]["module"] for run in study.data.runs if "data" in run.summary)
    return ", ".join(OWN_LOADERS.get(name, name.removesuffix("DataModule")) for name in names) or "Comparison"


def _facts_line(study: Study) -> str:
    clients = {len(run.clients) for run in study.data.runs if run.clients}
    count = " or ".join(map(str, sorted(clients))) or "?"
    methods, seeds = count_of(study.data.methods, "method"), count_of(study.data.seeds, "seed")
    return f"Deployed models, test {_metric_of(study)} · {methods} × {seeds} · {count} clients"
