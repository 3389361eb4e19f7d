"""Run by tests/test_ddp.py, once with one process and once with two: a federation whose clients train with DDP."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from fedlightning.callbacks import FENDA, FLIU, SCAFFOLD, FedProx, FedSAM, GlobalCheckpoint, LocalCheckpoint
from tests.helpers import Toy, make_trainer, toy_data

RUNS = {
    "scaffold": [SCAFFOLD(), FedProx(0.1), LocalCheckpoint(), GlobalCheckpoint()],
    "keep": [FLIU(gamma=0.5)],
    "fails": [],
    "fenda": [FENDA(head="net.3")],
    "sam": [FedSAM()],
}


class Fails(Toy):
    """A client whose inputs are too large has a problem in every process."""

    def training_step(self, batch, batch_idx):
        if batch[0].max() > 100:
            raise ValueError("a problem of this site")
        return super().training_step(batch, batch_idx)


def main(root: Path, devices: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    written = []

    def hear(event: str, args: tuple) -> None:
        inside = event == "open" and str(args[0]).startswith(f"{root}{os.sep}")
        if inside and isinstance(args[1], str) and args[1][0] in "wax":
            written.append(str(args[0]))

    sys.addaudithook(hear)
    for name in names:
        callbacks = RUNS[name]
        torch.manual_seed(0)
        resuming = name == "keep"
        module = Fails("momentum") if name == "fails" else Toy("momentum" if name == "keep" else "sgd")
        options = {
            "root": root,
            "callbacks": callbacks,
            "name": name,
            "devices": devices,
            "strategy": "ddp" if devices > 1 else "auto",
            "optimizer_state": "keep" if name == "keep" else "reset",
            "participation": 3,
        }
        trainer = make_trainer(max_rounds=2, **options)
        data = toy_data((16, 32, 24), batch_size=8 // devices)
        if name == "fails":
            data.tensors["1"]["train"][0][:, 0] = 1000.0
        trainer.fit(module, datamodule=data)
        if resuming:
            trainer = make_trainer(max_rounds=3, **options)
            trainer.fit(module, datamodule=data, resume="last")
        trainer.test()
        torch.save(
            {
                "model": trainer.server.model,
                "state": trainer.server.state,
                "rows": [vars(row) for row in trainer.rows],
                "run": str(trainer.run.path),
                "steps": {client: trainer.store.get(client).steps for client in "012"},
                "visits": {client: trainer.store.get(client).visits for client in "012"},
                "written": written[:],
            },
            root.parent / f"{root.name}-{name}-{rank}.pt",
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
