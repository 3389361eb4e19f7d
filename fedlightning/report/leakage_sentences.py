"""What attacks got, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_attacks(attacks: Mapping[str, Any]) -> list[str]:
    """Return what the attacks got, in sentences."""
    lines = []
    if rows := attacks.get("membership"):
        worst = max(rows, key=lambda row: row["auc"])
        telling = len([row for row in rows if row["low"] > 0.5])
        which = "the model is" if len(rows) == 1 else f"{telling} of {len(rows)} models are"
        verdict = "" if telling or len(rows) > 1 else "not "
        lines.append(
            f"Membership: {which} {verdict}found to have a lower loss on training samples than on others (95 % interval of "
            f"the AUC above 0.5); the highest AUC is {worst['auc']:.3f} ('{worst['model']}')."
        )
    sites = attacks.get("sites")
    if sites is not None:
        lines.append(
            f"Sites: class probabilities name a sample's client in {sites['accuracy']:.1%} of cases; its class alone in "
            f"{sites['chance']:.1%} (p = {sites['p']:.3g})."
        )
    if ratio := attacks.get("likelihood_ratio"):
        chance = f" (chance finds {ratio['chance']:.1%})" if "chance" in ratio else ""  # older runs have none
        lines.append(
            f"Likelihood ratio: with {ratio['shadows']} shadow runs, AUC {ratio['auc']:.3f} ({ratio['low']:.3f} to "
            f"{ratio['high']:.3f}), and {ratio['hits']:.1%} of {ratio['members']} members found where 1 % of "
            f"{ratio['others']} others at most are taken for one{chance}. More shadow runs find more."
        )
    if audit := attacks.get("canaries"):
        accounted = audit["accounted"]
        beside = "nothing is accounted for it" if accounted is None else f"it is accounted as {accounted:.2f}"
        lines.append(
            f"Canaries: {audit['right']} of {audit['guesses']} guesses were right whether a {audit['unit']} was there, so "
            f"epsilon is at least {audit['epsilon']:.2f} (confidence {audit['confidence']:.0%}, delta {audit['delta']:g}); "
            f"{beside}. So many canaries could have shown {audit['most']:.2f} at most: a bound from below, no guarantee."
        )
    if images := attacks.get("inversion"):
        lines.append(
            f"Inversion: images of client '{images['client']}' from the gradient of one step, batch {images['batch']}: PSNR "
            f"{images['psnr']:.1f} dB (MSE {images['mse']:.2g}); the mean of its images as a guess has "
            f"{images['psnr_of_mean']:.1f} dB. Labels were known, and more steps, larger batches, noise or secure sums give "
            "less away."
        )
    return lines + [f"Not tried: {why}" for why in attacks.get("missing", [])]
