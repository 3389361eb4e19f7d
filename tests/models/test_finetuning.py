"""Fine-tuning tiny transformers beside other methods, on short bases, and kinds of adapters: relations that must hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fedlightning
from fedlightning.callbacks import (
    APFL,
    QSGD,
    Ditto,
    FedAdam,
    FedAvgM,
    FedExLoRA,
    FedIT,
    FedPer,
    FedProx,
    FedSALoRA,
    FFALoRA,
    FlexLoRA,
    FLoRA,
    HetLoRA,
    Local,
    RandomK,
    SampleDP,
    SecureAggregation,
    TopK,
)
from fedlightning.datamodules import ByteTokenizer, TextDataModule
from fedlightning.models import HFModule
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from fedlightning.wrappers import unmix
from tests.helpers import Toy, close, differs, federate, global_state, make_trainer, same, spied, toy_data
from tests.models.test_hf_module import bert, classes, llama, peft_llama, texts

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
HEAD = "model.classifier"
SIZES: dict[str, Any] = {"r": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["query", "value"], "head": HEAD}


def module(dtype=torch.float32, **options):
    model = bert(num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return HFModule(model.to(dtype), **{"lr": 0.1, "optimizer": "sgd"} | options)


def run(*methods, made=None, **options):
    return federate(made or module(), classes(), list(methods), **{"max_rounds": 2, "local_steps": 2} | options)


def apart(a, b):
    """The distance of two states."""
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in a) ** 0.5


# -- beside other methods ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "absent",
    [FedProx(mu=0.0), FedAvgM(beta=0.0), TopK(share=1.0), Ditto(lam=0.0), APFL(alpha=0.0, adaptive=False)],
    ids=lambda callback: callback.key,
)
@pytest.mark.parametrize("method", [FedIT, FFALoRA, FedSALoRA])
def test_what_does_nothing_changes_no_adapter(method, absent):
    """A strength of zero, all elements of a code, and a personal model beside the global one."""
    (close if isinstance(absent, FedAvgM) else same)(
        global_state(run(method(**SIZES))), global_state(run(method(**SIZES), absent))
    )


def test_fedprox_and_ditto_pull_to_what_was_sent():
    start = global_state(run(FedIT(**SIZES), max_rounds=1, made=module(lr=1e-12)))
    free, held = (global_state(run(FedIT(**SIZES), FedProx(mu=mu), max_rounds=1)) for mu in (0.0, 3.0))
    assert 0 < apart(held, start) < apart(free, start)
    alone, pulled = (run(FedIT(**SIZES), Ditto(lam=lam)) for lam in (0.0, 3.0))
    mean = global_state(alone)
    own = [apart(module_state(trainer.module("a")), mean) for trainer in (alone, pulled)]
    assert own[1] < own[0]


def test_a_personal_model_that_nothing_pulls_is_training_alone():
    model = HFModule(
        peft.get_peft_model(
            module().model,
            peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], modules_to_save=["classifier"]),
        ),
        lr=0.1,
        optimizer="sgd",
    )
    personal, alone = run(FedIT(r=None), Ditto(lam=0.0), made=model), run(Local(), made=model)
    for client in "abc":
        same(module_state(personal.module(client)), module_state(alone.module(client)))


def test_a_server_optimizer_moves_adapters_only():
    trainer, spy = spied(module(), classes(), [FedIT(**SIZES), FedAdam(server_lr=0.01)], max_rounds=2)
    start, state = trainer.server.blueprint.base(""), global_state(trainer)
    assert all(torch.equal(state[name], value) for name, value in start.items())
    moved = {
        name for name in state if differs({name: state[name]}, {name: spy.messages[0].state.get(name, state[name])})
    }
    assert moved and moved <= set(spy.messages[0].state)


@pytest.mark.parametrize("code", [TopK(share=0.3), RandomK(share=0.5), QSGD()], ids=lambda code: code.key)
def test_a_code_sends_less_of_the_adapters_and_nothing_else(code):
    plain, coded = run(FedIT(**SIZES)), run(FedIT(**SIZES), code)
    assert coded.summary["bytes_up"] < 0.8 * plain.summary["bytes_up"]
    assert differs(global_state(plain), global_state(coded))
    base = coded.server.blueprint.base("")
    assert all(torch.equal(global_state(coded)[name], value) for name, value in base.items())


def test_secure_sums_of_adapters_are_the_means():
    close(global_state(run(FedIT(**SIZES))), global_state(run(FedIT(**SIZES), SecureAggregation())), atol=1e-5)


def test_a_private_step_of_adapters_without_a_bound_that_bites_and_with_hardly_any_noise_is_a_step():
    private = SampleDP(delta=1e-3, noise_multiplier=1e-9, clip=1e6, noise_seed=0)
    one = {"max_rounds": 1, "local_steps": 1}
    plain, noisy = run(FedIT(**SIZES), **one), run(FedIT(**SIZES), private, **one)
    start = global_state(run(FedIT(**SIZES), made=module(lr=1e-12), **one))
    assert 0 < apart(global_state(noisy), start) < 5 * apart(global_state(plain), start)


@pytest.mark.slow
@pytest.mark.parametrize("methods", [[FedIT(**SIZES)], [FedSALoRA(**SIZES)], [FedIT(**SIZES), Ditto()]])
def test_engines_agree_on_transformers(methods):
    here, there = (run(*copy.deepcopy(methods), engine=engine) for engine in ("sequential", Processes(workers=2)))
    same(global_state(here), global_state(there))
    same(module_state(here.module("b")), module_state(there.module("b")))


def test_a_head_of_ones_own_stays_and_adapters_travel():
    trainer, spy = spied(module(), classes(), [FedIT(**SIZES), FedPer(personal=[HEAD])], max_rounds=2)
    assert spy.updates and not any(HEAD in name for update in spy.updates for name in update.state)
    heads = [module_state(trainer.module(client)) for client in "ab"]
    assert differs(*({name: value for name, value in head.items() if HEAD in name} for head in heads))
    same(*({name: value for name, value in head.items() if "lora" in name} for head in heads))


# -- short bases -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", [FedIT, FlexLoRA, HetLoRA])
def test_adapters_of_a_short_base_are_whole_numbers_of_bits(dtype, method, tmp_path):
    """The base stays short; adapters train, travel, are averaged and saved in float32."""
    sizes = {"r": 2, "target_modules": ["q_proj", "v_proj"], "dropout": 0.0}
    made = HFModule(llama().to(dtype), lr=1e-2)
    options = {"max_rounds": 2, "save_state": 1, "name": "a"}
    trainer = federate(made, texts(), [method(**sizes)], tmp_path, **options)
    state = global_state(trainer)
    assert {state[name].dtype for name in trainer.server.shared_names()} == {torch.float32}
    assert {value.dtype for name, value in state.items() if "lora" not in name and value.is_floating_point()} == {dtype}
    resumed = make_trainer(tmp_path, [method(**sizes)], **options | {"max_rounds": 3})
    resumed.fit(HFModule(llama().to(dtype), lr=1e-2), datamodule=texts(), resume="last")
    whole = federate(HFModule(llama().to(dtype), lr=1e-2), texts(), [method(**sizes)], max_rounds=3)
    same(global_state(resumed), global_state(whole))
    opened = fedlightning.load(trainer.run.path / "checkpoints/global.ckpt", trust=["transformers"])
    same(module_state(opened), module_state(resumed.module()))


@pytest.mark.parametrize("method", [FLoRA, FedExLoRA])
def test_nothing_is_merged_into_a_short_base(method):
    with pytest.raises(
        ValueError, match=rf"{method.__name__} merges into 'model.bert.*query', whose weight is torch.bfloat16"
    ):
        run(method(r=2, target_modules=["query"]), made=module(torch.bfloat16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("methods", [[], [FedIT(r=2, target_modules=["classifier"])]], ids=["FedAvg", "FedIT"])
def test_layers_of_whole_numbers_are_refused(methods):
    made = module()
    made.model.bert = torch.ao.quantization.quantize_dynamic(made.model.bert, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"query\S* of HFModule holds quantized weights"):
        run(*methods, made=made)


# -- kinds of adapters -------------------------------------------------------------------------------------------------
def test_soft_prompts_travel_and_nothing_else():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    made = HFModule(peft.get_peft_model(llama(), config), lr=1e-1)
    trainer, spy = spied(made, texts(), [FedIT(r=None)], max_rounds=1)
    (name,) = spy.updates[0].state
    assert name.endswith("prompt_encoder.default.embedding.weight")
    mean = sum(u.num_samples * u.state[name].double() for u in spy.updates) / sum(u.num_samples for u in spy.updates)
    close({name: global_state(trainer)[name]}, {name: mean.float()})


@pytest.mark.parametrize("method", [FLoRA, FedExLoRA, FlexLoRA, HetLoRA])
def test_exact_rules_are_refused_beside_dora(method):
    with pytest.raises(ValueError, match="has adapters of peft already"):
        federate(HFModule(peft_llama(use_dora=True)), texts(), [method(r=2)], max_rounds=1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_train_their_adapters_as_others_do(reentrant):
    """Even behind embeddings that are frozen, where a checkpoint that is entered again could lose the gradient."""
    made = module()
    made.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    close(global_state(run(FedIT(**SIZES), sanity_check=True, made=made)), global_state(run(FedIT(**SIZES))))


class HalfReached(Toy):
    """Vectors of IA3 on two layers; the loss does not reach the second one."""

    def make(self, hidden, dropout):
        layers = torch.nn.ModuleList([torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)])
        config = peft.IA3Config(target_modules=["0", "1"], feedforward_modules=[])
        return peft.inject_adapter_in_model(config, layers)

    def forward(self, x):
        return self.net[0](x) + self.net[1](x).detach()


def test_vectors_without_a_gradient_are_found_before_round_1():
    with pytest.raises(ValueError, match=r"FedIT trains 'net.1.ia3_l.default', which got no gradient"):
        federate(HalfReached(), toy_data(), [FedIT(r=None)], sanity_check=True)


def test_a_merged_model_is_one_of_transformers(tmp_path):
    trainer = run(FedIT(**SIZES))
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        federated = trainer.module().eval().model(tokens).logits
        unmix(trainer.module()).model.save_pretrained(tmp_path)
        opened = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(opened(tokens).logits, federated)


# -- text ----------------------------------------------------------------------------------------------------------------
def test_a_sentence_that_all_clients_learn_is_written_on():
    sentence = "we sail at dawn over the sea"
    data = TextDataModule({client: ([{"text": sentence}] * 4,) for client in "ab"}, ByteTokenizer(), 4, 40)
    trainer = federate(HFModule(llama(), lr=1e-2), data, [], max_rounds=3, local_steps=20)
    model = trainer.module().eval().model
    written = model.generate(torch.tensor([list(b"we sail")]), max_new_tokens=40, do_sample=False)
    assert ByteTokenizer().decode(written[0]).startswith(sentence) and 256 in written[0]  # it ends there
