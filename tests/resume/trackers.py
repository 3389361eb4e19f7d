"""Stand-ins for the packages wandb and mlflow, as far as Lightning's loggers call them: servers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def modules(monkeypatch: pytest.MonkeyPatch, **contents: dict[str, Any]) -> None:
    """Make modules importable; `a__b` is `a.b`."""
    for name, content in contents.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)


class WandbServer:
    """Runs by id: `history` of what was logged, `summary` of the newest values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: dict[str, Any] = {}
        self.asked: list[tuple[str | None, str]] = []
        monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
        server = self

        class Run:
            def __init__(self, id: str) -> None:
                self.id, self.name, self.history, self.summary = id, id, [], {}

            def log(self, values: dict[str, Any]) -> None:
                self.history.append(values)
                self.summary.update(values)

            def define_metric(self, *args: Any, **kwargs: Any) -> None:
                pass

        def init(**given: Any) -> Run:
            server.asked.append((given["id"], given["resume"]))
            id = given["id"] or f"run{len(server.runs)}"
            if given["resume"] == "must" and id not in server.runs:
                raise RuntimeError(f"run {id} does not exist")
            return server.runs.setdefault(id, Run(id))

        modules(
            monkeypatch,
            wandb={"init": init, "run": None},
            wandb__sdk={},
            wandb__sdk__lib={"RunDisabled": type("RunDisabled", (), {})},
            wandb__wandb_run={"Run": Run},
        )


class MLFlowServer:
    """Runs by id: every metric that was logged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: dict[str, list[Any]] = {}
        self.status: dict[str, str] = {}
        monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", True)
        server = self

        class Client:
            def __init__(self, uri: str) -> None:
                pass

            def get_experiment_by_name(self, name: str) -> Any:
                return SimpleNamespace(experiment_id="0", lifecycle_stage="active")

            def create_run(self, experiment_id: str, tags: Any) -> Any:
                server.runs[f"run{len(server.runs)}"] = []
                return self.get_run(f"run{len(server.runs) - 1}")

            def get_run(self, id: str) -> Any:
                metrics = {metric.key: metric.value for metric in server.runs[id]}
                return SimpleNamespace(
                    info=SimpleNamespace(run_id=id, experiment_id="0"), data=SimpleNamespace(metrics=metrics)
                )

            def get_metric_history(self, id: str, key: str) -> list[Any]:
                return [metric for metric in server.runs[id] if metric.key == key]

            def log_batch(self, run_id: str, metrics: list[Any]) -> None:
                server.runs[run_id] += metrics

            def set_terminated(self, id: str, status: str) -> None:
                server.status[id] = status

            def update_run(self, id: str, status: str) -> None:
                server.status[id] = status

        modules(
            monkeypatch,
            mlflow={"set_tracking_uri": lambda uri: None},
            mlflow__tracking={"MlflowClient": Client},
            mlflow__tracking__context={},
            mlflow__tracking__context__registry={"resolve_tags": lambda tags: tags},
            mlflow__entities={"Metric": lambda **given: SimpleNamespace(**given)},
        )
