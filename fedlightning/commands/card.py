"""`fedlightning card`: a model card of a run, in the format of the Hugging Face Hub, beside the models that it describes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedlightning.catalogue import Algorithm, find
from fedlightning.commands.folders import find_run
from fedlightning.commands.json_output import print_json
from fedlightning.commands.study_options import Parser
from fedlightning.commands.terminal import console, say, shown
from fedlightning.config.input_errors import InputError
from fedlightning.report.cells import is_number
from fedlightning.report.sections.privacy import describe_account
from fedlightning.scores.metric_names import ACCURACY, higher_is_better
from fedlightning.storage.files import read_json
from fedlightning.study.calibration import wilson
from fedlightning.study.finished_runs import Run, load_run
from fedlightning.study.roles import acting_callbacks
from fedlightning.study.run_scores import common_metric
from fedlightning.study.target_units import target_of

DESCRIPTION = """\
Write a model card (README.md) and copy the global model and the configuration beside it: a folder that
huggingface_hub can upload. The card has the data, the method, the scores of each client with intervals, what was
shared, and what a reader has to add. Models of single clients are copied only with --clients."""
EXAMPLES = """\
examples:
  fedlightning card runs/quickstart/version_0
  fedlightning card runs/heart/version_2 --out card --license apache-2.0
"""
ADD = "*To be added by whoever publishes this: whose data these are, with which consent, and what the model is for.*"
"""What no run knows."""
GLOBAL, PRIVACY = Path("checkpoints/global.ckpt"), Path("privacy.json")
MADE_WITH = "Made with FedLightning"
SPENT = ("epsilon", "epsilon_participants_known", "delta", "clip", "noise_multiplier", "rounds")
USE = """## Use it

```python
import fedlightning

model = fedlightning.load("checkpoints/global.ckpt", trust=["your_package"])  # your own classes need your word
```
"""


def parser() -> Parser:
    """Return the parser of the command."""
    command = Parser("card", "RUN", DESCRIPTION, EXAMPLES)
    command.add_argument("run", metavar="RUN", help="folder of a finished run")
    command.add_argument("--out", type=Path, metavar="DIR", help="folder to write to; default: RUN/card")
    command.add_argument(
        "--license", metavar="NAME", help="licence of the model, as the Hub writes it, such as apache-2.0"
    )
    command.add_argument("--metric", help="metric of the table by client; default: that of a report")
    command.add_argument("--clients", action="store_true", help="copy the models of single clients too")
    command.add_argument("--force", action="store_true", help="overwrite a card that is there, and the files beside it")
    command.add_argument("--json", action="store_true", help="print the files as one line of JSON too, the last one")
    return command


def card(words: Sequence[str]) -> int:
    """Carry out the command and return its exit code."""
    options = parser().parse_args(list(words))
    folder = find_run(options.run, "metrics.csv")
    run = load_run(folder)
    out: Path = options.out or folder / "card"
    if (out / "metrics.csv").exists():
        raise InputError(
            f"--out={shown(out)} is a run's folder, and a card has files of the same names. Give another one."
        )
    page = out / "README.md"
    replaces = page.exists()
    if replaces and not options.force:
        raise InputError(f"{page} is there already. Give another folder with --out, or --force.")
    if replaces and MADE_WITH not in page.read_text(encoding="utf-8", errors="replace"):
        raise InputError(f"{page} is not a card, and stays. Give another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    page.write_text(card_of(run, options.metric or common_metric([run]), options.license), encoding="utf-8")
    files, paths = [page], _find_files(folder, options.clients)
    for path in set(_find_files(out, clients=True) if replaces else ()).difference(paths):
        (out / path).unlink()  # an older card's, of another run or with models of clients
    for path in paths:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        files.append(Path(shutil.copyfile(folder / path, out / path)))
    say(console(), f"Card: {shown(out / 'README.md')} ({len(files)} files)")
    if options.json:
        print_json("card", out=out, files=files)
    return 0


def _find_files(folder: Path, clients: bool) -> list[Path]:
    """Return the files beside a card, as they lie in a folder: a frozen network is one that models need and do not hold."""
    patterns = [
        "config.yaml",
        str(GLOBAL),
        "checkpoints/base-*.pt",
        *(["checkpoints/clients/*.ckpt"] if clients else []),
    ]
    return [path.relative_to(folder) for pattern in patterns for path in sorted(folder.glob(pattern))]


def card_of(run: Run, metric: str, licence: str | None = None) -> str:
    """Return the card of a run.

    Args:
        run: A finished run.
        metric: Metric of the table by client.
        licence: Licence of the model.
    """
    summary = run.summary
    title = f"{summary.get('model', 'A model')}, trained by {' + '.join(_algorithms(summary))}"
    parts = [
        _head(run, metric, licence),
        f"# {title} on {summary.get('num_clients', '?')} clients\n",
        f"{MADE_WITH} {summary.get('versions', {}).get('fedlightning', '?')}.\n",
        f"{ADD}\n",
        "## Data\n",
        *_data(summary),
        "## Method\n",
        *_methods(summary),
        "## Scores\n",
        *_scores(run, metric),
        "## What was shared\n",
        *_shared(run),
    ]
    if run.path is not None and (run.path / GLOBAL).exists():
        parts.append(USE)
    return "\n".join(parts)


def _algorithms(summary: Mapping[str, Any]) -> dict[str, Algorithm | None]:
    """Return the algorithms of a run with their rows in the catalogue, which has none of a method of the user's."""
    rows: dict[str, Algorithm | None] = {}
    for name in acting_callbacks(summary) or ["FedAvg"]:
        try:
            rows[name] = find(name)
        except ValueError:
            rows[name] = None
    return rows


def _head(run: Run, metric: str, licence: str | None) -> str:
    """Return the front matter that the Hub reads."""
    row = run.result(metric) or run.result(metric, model="global")
    front: dict[str, Any] = {
        "library_name": "pytorch-lightning",
        "tags": ["federated-learning", "fedlightning", *_algorithms(run.summary)],
        "metrics": [metric],
    }
    if licence:
        front["license"] = licence
    if row is not None and row["mean"] is not None:
        result = {"type": metric, "value": round(row["mean"], 4), "name": f"{metric}, mean over clients"}
        data = run.summary.get("data", {}).get("module", "federated data")
        front["model-index"] = [
            {
                "name": run.name,
                "results": [
                    {"task": {"type": "other"}, "dataset": {"name": data, "type": "other"}, "metrics": [result]}
                ],
            }
        ]
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n"


def _data(summary: Mapping[str, Any]) -> Iterator[str]:
    data = summary.get("data", {})
    clients = list(data.get("clients", {}).values())
    yield f"`{data.get('module', '?')}`, divided by `{data.get('partition', '?')}`.\n"
    if clients:
        sizes = sorted(client["train"] for client in clients)
        samples = {split: sum(client[split] for client in clients) for split in ("val", "test")}
        yield (
            f"{len(clients)} clients with {sizes[0]} to {sizes[-1]} training samples ({sum(sizes)} in all), "
            f"{samples['val']} for validation, {samples['test']} for test.\n"
        )


def _methods(summary: Mapping[str, Any]) -> Iterator[str]:
    algorithms = _algorithms(summary)
    for name, row in algorithms.items():
        options = ", ".join(f"{key}={value!r}" for key, value in summary.get("callbacks", {}).get(name, {}).items())
        what = "*to be added: what it does, and its paper.*" if row is None else f"{row.sentence} {row.paper}."
        yield f"**{name}**({options}): {what}\n"
    others = [name for name in summary.get("callbacks", {}) if name not in algorithms]
    if others:
        yield f"Beside it: {', '.join(others)}.\n"
    steps, agreed = summary.get("local_steps_total"), summary.get("terms", {})
    yield (
        f"{summary.get('rounds', '?')} rounds, {steps} local steps of all clients together, optimizers "
        f"{'kept' if agreed.get('optimizer_state') == 'keep' else 'made anew'} in every visit, seed {summary.get('seed')}.\n"
    )


def _scores(run: Run, metric: str) -> Iterator[str]:
    """Return a table by client: the deployed model and the global one, with intervals where they are shares."""
    deployed, shared = run.scores(metric) or {}, run.scores(metric, model="global") or {}
    if not deployed and not shared:
        yield f"The run has no test scores of {metric}.\n"
        return
    sizes = {name: client["test"] for name, client in run.summary.get("data", {}).get("clients", {}).items()}
    worst = min if higher_is_better(metric) else max
    for model, scores in (("deployed", deployed), ("global", shared)):
        values = [value for value in scores.values() if value is not None]
        if values:
            mean = sum(values) / len(values)
            yield f"Mean over clients, {model} model: {mean:.3f}; worst client {worst(values):.3f}."
    yield "\n| client | test samples | deployed model | global model |\n|---|---|---|---|"
    for client in run.clients:
        cells = (_with_interval(scores.get(client), sizes.get(client), metric) for scores in (deployed, shared))
        yield f"| {client} | {sizes.get(client, '-')} | {' | '.join(cells)} |"
    if (units := target_of(run.config).in_words(metric)) is not None:
        yield f"\n{units}"
    if metric in ACCURACY:
        yield "\nIntervals (95 %, Wilson) are over a client's test samples; they do not hold what another seed would change."
    yield ""


def _with_interval(value: float | None, samples: int | None, metric: str) -> str:
    """Return a score, with Wilson's interval of a share: Wilson, JASA 1927."""
    if value is None:
        return "-"
    if metric not in ACCURACY or not samples:
        return f"{value:.3f}"
    low, high = wilson(value, samples)
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _shared(run: Run) -> Iterator[str]:
    summary = run.summary
    for name, row in _algorithms(summary).items():
        if row is None:
            yield f"- **{name}**: *to be added: what it sends, and what never leaves a client.*"
            continue
        yield f"- **{name}**: down {row.down}; up {row.up}. What may ever leave a client: {row.leaves}."
        if row.of_clients:
            yield f"- The server kept of each client: {row.of_clients}."
    up, down = summary.get("bytes_up", 0), summary.get("bytes_down", 0)
    yield f"- {up / 1e6:.1f} MB went up and {down / 1e6:.1f} MB down, over all clients and rounds."
    energy = summary.get("energy")
    yield f"- Energy: {energy}." if energy else "- Energy was not measured."
    spent = run.path / PRIVACY if run.path is not None else None
    if spent is None or not spent.exists():
        yield "- No differential privacy was accounted for: models can say something about the data they were trained on.\n"
        return
    account = read_json(spent)
    if not account.get("private"):
        yield f"- No differential privacy: the noise came from a fixed seed ({PRIVACY}).\n"
        return
    costs = ", ".join(f"{name.replace('_', ' ')} {account[name]:.4g}" for name in SPENT if is_number(account.get(name)))
    yield (
        f"- Differential privacy, as the run accounted for it ({PRIVACY}): {costs}. {describe_account(account)} The scores "
        "above are not covered.\n"
    )
