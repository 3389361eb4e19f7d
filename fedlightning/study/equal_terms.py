"""Equal terms: what methods were given beside the algorithm, and sentences about what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedlightning.errors import join_words

if TYPE_CHECKING:  # planning a comparison needs the sentences, not the study
    from fedlightning.study.data import StudyData, Table

NOT_EQUAL = "Not on equal terms"
REMEDY = "fedlightning compare --optimizer-state reset (or keep) makes all alike"
WORDS = {
    "keep": ("keeps its optimizers' state from visit to visit", "keep their optimizers' state from visit to visit"),
    "reset": ("begins every visit with new optimizers", "begin every visit with new optimizers"),
}


def terms(study: StudyData) -> Table:
    """Return one line a method: the terms on which its runs were trained."""
    return [{"method": method, **_terms(_of(study, method))} for method in study.methods]


def _of(study: StudyData, method: str) -> list[Mapping[str, Any]]:
    runs = [study.finished[method, seed].run for seed in study.seeds_of(method)]
    return [run_terms for run in runs if isinstance(run_terms := run.summary.get("terms"), Mapping)]


def _terms(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = runs[0] if runs else {}
    selection = first.get("selection") or {}
    return {
        **{name: first.get(name) for name in ("optimizer_state", "optimizer_memory", "weighting")},
        **{name: _mean(runs, name) for name in ("local_steps", "own_steps", "fine_tuning_steps", "selections")},
        "candidates": max(selection.values(), default=0) if runs else None,
    }


def _mean(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    numbers = [float(run[name]) for run in runs if run.get(name) is not None]
    return sum(numbers) / len(numbers) if numbers else None


def unequal(study: StudyData) -> Iterator[str]:
    """Give a sentence for everything in which the terms of the methods differ, beside the step budget."""
    lines = [line for line in terms(study) if line["local_steps"] is not None]
    yield from optimizer_states(
        {line["method"]: line["optimizer_state"] for line in lines},
        any(line["optimizer_memory"] is not False for line in lines),
    )
    yield from weightings(
        {line["method"]: line["weighting"] for line in lines if study.role(line["method"]) != "central"}
    )
    for name, what, other in (
        ("own_steps", "took {} more local steps on models of the clients' own", "none"),
        ("fine_tuning_steps", "fine-tuned for {} steps after the last round", "not at all"),
        ("selections", "passed {} times over clients' validation data to choose or weight models in training", "never"),
    ):
        spent = {line["method"]: line[name] for line in lines if line[name]}
        if spent and len(set(spent.values())) + (len(spent) < len(lines)) > 1:
            clauses = "; ".join(f"{method} {what.format(f'{count:,.0f}')}" for method, count in spent.items())
            yield f"{NOT_EQUAL}: {clauses}{f'; the others {other}' if len(spent) < len(lines) else ''}."
    groups = _groups({line["method"]: line["candidates"] for line in lines})
    if len(groups) > 1:
        clauses = "; ".join(
            f"the last model of {join_words(names)}"
            if not count
            else f"the best of {count} on validation data of {join_words(names)}"
            for count, names in groups.items()
        )
        yield f"{NOT_EQUAL}: deployed is {clauses}. Give all methods the same checkpoints, or compare --checkpoint latest."


def optimizer_states(states: Mapping[str, str | None], matters: bool = True) -> Iterator[str]:
    """Give a sentence if some methods keep their optimizers' state and others do not.

    Example:
        >>> print(next(optimizer_states({"local": "keep", "fedavg": "reset", "fedprox": "reset"})).partition(", ")[2][:51])
        fedavg and fedprox begin every visit with new optim
    """
    groups = {state: names for state, names in _groups(states).items() if state in WORDS}
    if matters and len(groups) > 1:
        clauses = ", ".join(
            f"{join_words(names)} {WORDS[str(state)][len(names) > 1]}" for state, names in groups.items()
        )
        yield (
            f"{NOT_EQUAL}: {clauses}; with momentum, Adam or a schedule and short visits this alone can decide which is "
            f"better. {REMEDY}."
        )


def weightings(weighting_by_method: Mapping[str, str | None]) -> Iterator[str]:
    """Give a sentence if methods that average weight the clients differently."""
    groups = _groups({method: weighting for method, weighting in weighting_by_method.items() if weighting is not None})
    if len(groups) > 1:
        clauses = "; ".join(
            f"{_weighting(str(weighting))} in {join_words(names)}" for weighting, names in groups.items()
        )
        yield f"{NOT_EQUAL}: clients weigh {clauses}. Where a method has the option weighting, set the same on all."


def _weighting(name: str) -> str:
    return {"samples": "by their samples", "uniform": "all the same", "log": "by the log of their samples"}.get(
        name, f"in {name} way"
    )


def _groups(values: Mapping[str, Any]) -> dict[Any, list[str]]:
    groups: dict[Any, list[str]] = {}
    for method, value in values.items():
        groups.setdefault(value, []).append(method)
    return groups
