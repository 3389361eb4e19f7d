"""The tables of a study as files: `comparison.json` and `comparison.csv`."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlightning.compat import sheets
from fedlightning.storage.files import write_text_atomically
from fedlightning.study.evidence import word_of_best
from fedlightning.study.ranks import ranks
from fedlightning.study.study import Study

TABLES = ("results", "overview", "problems")
"""Keys of `comparison.json` that hold lines of a table; the others say what the lines are of."""
SOMETIMES = {
    "negative_transfer": Study.negative_transfer,
    "unseen": Study.unseen,
    "external": Study.external,
    "calibration": Study.calibrations,
    "subgroups": Study.subgroups,
    "architectures": Study.architectures,
    "clusters": Study.clusters,
    "memberships": Study.memberships,
    "ledgers": Study.ledgers,
    "tokens": Study.tokens,
    "timeline": Study.timeline,
}
"""Further tables, of runs that have what they are made from."""


def write_comparison(study: Study | Mapping[str, Study], out: str | Path) -> dict[str, Any]:
    """Write `comparison.json`, `comparison.csv` and `comparison.tex` into a folder.

    The JSON has the lines of `results`, `overview` and `problems`, and says what they are of: `methods`, `seeds`,
    `metric` and so on. A missing number is `null`, never NaN. For several studies every line begins with its `dataset`,
    `datasets` describes each of them, and `ranks` holds :func:`fedlightning.study.ranks.ranks` (`null` where there can
    be none).

    Where clients have models of different architectures, the JSON has `architectures`. Where runs held clients out, it has
    `unseen`, their scores; no other mean holds them. Where runs have a `clusters.csv`, it has `clusters` and `memberships`;
    where they have a `ledger.csv`, `ledgers` and `tokens`; where they have a virtual clock, `timeline`. Of
    leave-one-site-out it has `external`, and where there are probabilities `calibration` and `subgroups`.

    The CSV has `results` without nested columns: `ci95` becomes `ci95_low` and `ci95_high`, and `undefined` and
    `diverged` become text. Values by seed and by client are only in the JSON.
    """
    tables = comparison(study)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / "comparison.json", json.dumps(tables, indent=1, allow_nan=False))
    write_text_atomically(folder / "comparison.csv", as_csv([flat(line) for line in tables["results"]]))
    studies = study if isinstance(study, Mapping) else {"": study}
    write_text_atomically(folder / "comparison.tex", "\n".join(as_tex(part, name) for name, part in studies.items()))
    return tables


def comparison(study: Study | Mapping[str, Study]) -> dict[str, Any]:
    """Return the content of `comparison.json`; see :func:`write_comparison`."""
    if not isinstance(study, Mapping):
        data = study.data
        content: dict[str, Any] = plain(
            {
                "results": study.results(),
                "overview": study.overview(),
                "problems": [problem.as_dict() for problem in study.problems],
                "methods": data.methods,
                "seeds": data.seeds,
                "seed_text": data.seed_text,
                "metric": data.metric,
                "split": data.split,
                "checkpoint": data.checkpoint,
                "confidence": data.confidence,
                "interval": data.interval,
                "baselines": data.baselines,
            }
        )
        return content | {name: plain(lines) for name, table in SOMETIMES.items() if (lines := table(study))}
    each = {name: comparison(part) for name, part in study.items()}
    tables: dict[str, Any] = {
        table: [{"dataset": name} | line for name, part in each.items() for line in part.get(table, ())]
        for table in (*TABLES, *(name for name in SOMETIMES if any(name in part for part in each.values())))
    }
    about = {name: {key: part[key] for key in part if key not in (*TABLES, *SOMETIMES)} for name, part in each.items()}
    methods = list(dict.fromkeys(method for part in each.values() for method in part["methods"]))
    seeds = sorted({seed for part in each.values() for seed in part["seeds"]})
    try:
        ranked = plain(ranks(study))
    except ValueError:
        ranked = None  # fewer than 3 methods that every study has; the report says why
    return tables | {"methods": methods, "seeds": seeds, "datasets": about, "ranks": ranked}


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of a table without nested values.

    Example:
        >>> flat({"mean": 0.7, "ci95": [0.6, 0.8], "undefined": ["a", "b"], "per_seed": {"0": 0.7}})
        {'mean': 0.7, 'ci95_low': 0.6, 'ci95_high': 0.8, 'undefined': 'a; b'}
    """
    cells: dict[str, Any] = {}
    for name, value in line.items():
        if name.endswith("ci95"):
            low, high = value if value is not None else (None, None)
            cells |= {f"{name}_low": low, f"{name}_high": high}
        elif isinstance(value, list):
            cells[name] = "; ".join(map(str, value))
        elif not isinstance(value, dict):
            cells[name] = value
    return cells


def as_csv(lines: list[dict[str, Any]]) -> str:
    """Return the lines of a table as CSV text, with empty cells for missing numbers."""
    if not lines:
        return ""
    file = io.StringIO()
    sheets.write_table(file, list(lines[0]), lines, lineterminator="\n")
    return file.getvalue()


def as_tex(study: Study, name: str = "") -> str:
    """Return the overview as a LaTeX table for the package booktabs: score, worst client, difference to the best, p."""
    rows, data = study.overview(), study.data
    better = max if data.higher_is_better else min
    best = better((row["mean"] for row in rows if row["mean"] is not None and row["role"] != "central"), default=None)
    lines = [
        *(
            f"% {text}"
            for text in (name, f"test {data.metric}, mean over clients, then over seeds. {data.seed_text}")
            if text
        ),
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"Method & Score & Worst client & Difference to best & $p$ (Holm) \\",
        r"\midrule",
    ]
    word = word_of_best(data).replace("–", "--")
    for row in rows:
        score = _tex_interval(row["mean"], row["ci95"], row["ci95_radius"])
        score = rf"{{\boldmath{score}}}" if row["mean"] is not None and row["mean"] == best else score
        gap = word if row["best"] else _tex_interval(row["gap"], row["gap_ci95"], None)
        p = "" if row["gap_p_holm"] is None else "$<0.001$" if row["gap_p_holm"] < 0.001 else f"{row['gap_p_holm']:.3f}"
        seeds = f" ({row['n_seeds']} of {row['seeds']} seeds)" if row["n_seeds"] < row["seeds"] else ""
        cells = (_tex(row["method"] + seeds), score, _tex_interval(row["worst"], None, None), gap, p)
        lines.append(f"{' & '.join(cells)} {chr(92) * 2}")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _tex(text: str) -> str:
    r"""Return a text with the characters that mean something in LaTeX escaped.

    Example:
        >>> _tex("fedprox_mu 50%")
        'fedprox\\_mu 50\\%'
    """
    text = text.replace("\\", r"\textbackslash ")
    return "".join(f"\\{sign}" if sign in "&%$#_{}" else sign for sign in text)


def _tex_interval(value: float | None, interval: list[float] | None, radius: float | None) -> str:
    if value is None:
        return "--"
    if radius is not None:
        return rf"${value:.3f} \pm {radius:.3f}$"
    ends = "" if interval is None else rf"\ [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"${value:.3f}{ends}$"


def plain(value: Any) -> Any:
    """Return `value` with text keys, and with `None` for NaN and infinity, which JSON cannot hold.

    Example:
        >>> plain({0: [0.5, float("nan")]})
        {'0': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
