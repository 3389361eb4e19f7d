"""A league of two methods on a tiny task, rows made by hand, and data whose test labels are permuted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.datamodules import DigitsDataModule
from tests.experiments.tiny import small

PERMUTED = "tests.experiments.tiny_league.PermutedTests"


class PermutedTests(DigitsDataModule):
    """Digits whose test labels are permuted."""

    def client_dataloader(self, client: str, split: str) -> Any:
        found = super().client_dataloader(client, split)
        if split != "test":
            return found
        x, y = (torch.cat(parts) for parts in zip(*found, strict=True))
        return DataLoader(TensorDataset(x, (y + 1) % 10), batch_size=16)


def league(folder: Path, data: str = "fedlightning.datamodules.DigitsDataModule", **changes: Any) -> Path:
    """Write a league of FedAvg and FedProx on a task of 90 digits."""
    folder.mkdir(parents=True, exist_ok=True)
    task = yaml.safe_load(Path(small(folder / "tiny.yaml")).read_text())
    task["data"]["class_path"] = data
    (folder / "tiny.yaml").write_text(yaml.safe_dump(task))
    content = {
        "trials": 4,
        "keep": 2,
        "finalists": 1,
        "search_seed": 0,
        "trial_seeds": [1000, 1001],
        "seeds": [0, 1],
        "references": ["FedAvg"],
        "tasks": {
            "tiny": {
                "title": "tiny digits",
                "metric": "accuracy",
                "learning_rate": "log:0.01:1.0",
                "vary": ["data.init_args.seed"],
            }
        },
        "groups": {"a global model": {"FedAvg": {}, "FedProx": {"space": {"mu": "log:0.01:1.0"}}}},
        **changes,
    }
    path = folder / "league.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def row(
    method: str, scores: list[float | None], *, mb: float = 1.0, steps: int = 10, rounds: int = 2
) -> dict[str, Any]:
    """Return a row as a run would have given it: two rounds, the second better than the first."""
    curve = [[number, number * steps, number * mb / rounds, 0.1 * number] for number in range(1, rounds + 1)]
    runs = {
        str(seed): {
            "score": score,
            "worst": score,
            "mb": mb,
            "steps": rounds * steps,
            "train": 100,
            "test": 25,
            "curve": curve,
        }
        for seed, score in enumerate(scores)
    }
    trials = [{"values": {"model.init_args.lr": "0.1"}, "val_loss": 1.0, "seconds": 2.0}]
    return {"method": method, "setting": "x", "trials": trials, "best": trials[0]["values"], "seeds": runs}
