"""Who hears of scores: callbacks of those of the model that a client deploys, on its own data."""

from __future__ import annotations

from typing import Any

from fedlightning.callbacks import FedPer, GlobalCheckpoint, LocalCheckpoint
from fedlightning.contract import Facts, ModelSelection
from fedlightning.options import Evaluation
from tests.helpers import Toy, make_trainer, toy_data


class Hears(ModelSelection):
    """Notes whose scores it is told."""

    facts = Facts(takes_part=False)
    heard: list[tuple[str, str, str]] = []  # shared by the copies on purpose

    def on_client_evaluated(self, client: Any, stage: str, split: str, metrics: Any, module: Any) -> None:
        self.heard.append((client.id, stage, split))


def test_callbacks_see_no_scores_of_kept_models(tmp_path):
    Hears.heard.clear()
    callbacks = [LocalCheckpoint(), GlobalCheckpoint(), Hears()]
    trainer = make_trainer(tmp_path, callbacks, max_rounds=2, evaluation=1)
    trainer.fit(Toy(), datamodule=toy_data((8, 8)))
    assert {(client, "val") for client in "01"} <= {(client, split) for client, _, split in Hears.heard}
    for kept in ("best_local", "best_global"):
        Hears.heard.clear()
        trainer.test(checkpoint=kept)
        assert {row["checkpoint"] for row in trainer.results if row["split"] == "test"} >= {kept}
        assert (kept, Hears.heard) == (kept, [])
    trainer.test(checkpoint="latest")
    assert {split for _, _, split in Hears.heard} == {"test"}


def test_callbacks_see_scores_on_the_clients_own_data_alone(tmp_path):
    Hears.heard.clear()
    trainer = make_trainer(
        tmp_path,
        [FedPer(personal=["net.3"]), Hears()],
        max_rounds=1,
        evaluation=Evaluation(test_data=["local", "clients"]),
    )
    trainer.fit(Toy(), datamodule=toy_data((8, 8)))
    trainer.test()
    tested = [one for one in Hears.heard if one[2] == "test"]
    assert len(trainer.results) > len(set(tested)) and sorted(tested) == sorted(set(tested))
    assert {(client, stage) for client, stage, _ in tested} == {(c, stage) for c in "01" for stage in ("L1", "L2")}
