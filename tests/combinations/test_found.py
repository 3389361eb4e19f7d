"""What the generator has found: combinations that were wrong, or ended in a raw error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlightning.callbacks import PIFL
from tests.combinations.scenes import Refused, Scene, results
from tests.combinations.test_relations import alike

COMPARED_BY_LOSSES = ("Dapper alone", "FedSoft", "FedMultimodal", "HetLoRA", "FedLC", "FedNTD")


@pytest.mark.parametrize("name", COMPARED_BY_LOSSES)
def test_a_module_that_optimizes_manually_has_no_loss_to_add_to_or_to_compare_by(name: str) -> None:
    with pytest.raises(Refused, match=r"loss that training_step returns, but (Adapter_)?Manual optimizes manually"):
        Scene("manual", (name,)).run()


def test_the_personal_model_stays_where_the_step_skips_a_batch() -> None:
    """APFL left its local model at the mixture."""
    scene = Scene("skips", ("APFL",))
    alike(results(scene.run()), results(scene.but(options={"engine": "vectorized"}).run()))


@pytest.mark.parametrize(
    "name",
    ["AFL", "FedSAM", "FedFomo", "FedSoft", "MaxFL", "PIFL", "PerFedAvg exact", "QFedAvg", "SCAFFOLD option 1"],
)
def test_a_batch_that_the_step_skips_counts_in_no_mean_either(name: str) -> None:
    """A client's loss, its gradient, or its samples' losses ended the run; so did a second pass over nothing."""
    Scene("skips", (name,)).run()


def test_the_state_of_a_method_over_complex_double_entries_is_saved(tmp_path: Path) -> None:
    """AFL's mean was a view of the model's memory under another type, which torch refuses to save."""
    Scene("complex", ("AFL",), options={"save_state": 1}).run(tmp_path)


def test_fedgkt_compares_losses_in_the_precision_of_the_module() -> None:
    """A module in double precision ended in an error of torch about types."""
    Scene("complex", ("FedGKT edge",)).run()


def test_steps_of_several_optimizers_have_no_one_size_for_l2gd() -> None:
    """The rate was the sum of one optimizer's over the steps of another: twice too large, or a division by none."""
    with pytest.raises(Refused, match="the module has 2 optimizers, each with steps of its own"):
        Scene("manual", ("L2GD",)).run()


@pytest.mark.parametrize("name", ["ModelReplacement", "SignFlip"])
def test_an_attack_is_on_every_name_of_a_tied_weight(name: str) -> None:
    """The last name has the last word, and it had the honest value: the weight was not attacked at all."""
    honest, attacked = (results(Scene("full", names).run())["server"]["global"] for names in ((), (name,)))
    assert not torch.equal(attacked["again.weight"], honest["again.weight"])


def test_a_scaled_mixture_of_clusters_scales_every_name_of_a_tied_weight() -> None:
    def deployed_by(normalize: bool) -> Any:
        algorithm = PIFL(monitor="val_loss", threshold=-0.5, normalize=normalize)
        return results(Scene("full", (algorithm,), options={"max_rounds": 1}).run())["client 'site0'"]

    plain, scaled = (deployed_by(normalize) for normalize in (True, False))
    factors = [scaled[name] / plain[name] for name in ("body.0.weight", "middle.weight")]
    assert float(factors[1].mean()) == pytest.approx(float(factors[0].mean()), rel=1e-4)
