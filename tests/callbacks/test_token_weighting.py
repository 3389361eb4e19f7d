"""TokenWeighting on a tiny language model, and where the module does not say what a batch holds."""

from __future__ import annotations

import pytest

from fedlightning.callbacks import Ditto, TokenWeighting
from fedlightning.models import HFModule
from tests.helpers import Toy, close, federate, global_state, spied, toy_data
from tests.models.test_hf_module import TEXTS, llama, texts


def test_clients_are_weighed_by_their_tokens():
    trainer, spy = spied(HFModule(llama(), lr=1e-2), texts(), [TokenWeighting()], max_rounds=1)
    tokens = {client: sum(min(len(text), 23) for text in some) for client, some in TEXTS.items()}
    assert {u.client: u.extras["TokenWeighting"]["tokens"] for u in spy.updates} == tokens
    name = "model.lm_head.weight"
    mean = sum(tokens[update.client] * update.state[name].double() for update in spy.updates) / sum(tokens.values())
    close({name: global_state(trainer)[name]}, {name: mean.float()})
    with pytest.raises(ValueError, match="TokenWeighting asks the module"):
        federate(Toy(), toy_data(), [TokenWeighting()])


def test_tokens_of_a_clients_own_model_do_not_count():
    """Ditto's personal model trains in the same visit, here for two steps or epochs."""
    method = Ditto(work=2)
    _, spy = spied(HFModule(llama(), lr=1e-3), texts(), [method, TokenWeighting()], max_rounds=1)
    for update in spy.updates:
        tokens = sum(min(len(text), 23) for text in TEXTS[update.client])
        assert update.extras["TokenWeighting"]["tokens"] == tokens
