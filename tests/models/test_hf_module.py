"""HFModule and TextDataModule on tiny random models of transformers, and adapters that peft has put into them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

import fedlightning
from fedlightning.callbacks import FedAvg, FedExLoRA, FedIT, FedSALoRA, FFALoRA, FLoRA, RoLoRA
from fedlightning.commands.card import card
from fedlightning.datamodules import ByteTokenizer, TextDataModule
from fedlightning.deployment import checkpoints
from fedlightning.deployment.export import Brought, Deployed
from fedlightning.experiments.reproduce import measures
from fedlightning.models import HFModule
from fedlightning.storage.files import read_tensors
from fedlightning.study.finished_runs import load_run
from fedlightning.tensors import module_state
from fedlightning.wrappers.adapters import save_peft
from tests.helpers import (
    Toy,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    plain_fit,
    same,
    spied,
    toy_data,
)

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TEXTS = {
    "a": ["the rain falls", "a fox runs over the hill", "no", "we sail", "a long line of words that is cut"],
    "b": ["one two three", "four", "five six"],
    "c": ["over", "the sea", "and far away", "it goes"],
}


def llama(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=257, eos_token_id=256, **options)
    return transformers.LlamaForCausalLM(config)


def bert(kind=transformers.BertForSequenceClassification, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    return kind(transformers.BertConfig(**sizes, num_attention_heads=4, pad_token_id=257, **options))


def t5():
    sizes = {"vocab_size": 258, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def texts(batch_size=2, **options):
    rows = {client: [{"text": text} for text in some] for client, some in TEXTS.items()}
    return TextDataModule({c: (r, r[:2], r[:2]) for c, r in rows.items()}, ByteTokenizer(), batch_size, 24, **options)


def classes():
    rows = {c: [{"text": text, "label": len(text) % 3} for text in some] for c, some in TEXTS.items()}
    return TextDataModule({c: (r, r[:2], r[:2]) for c, r in rows.items()}, ByteTokenizer(), 2)


def first_batch(data, client="a"):
    return next(iter(data.client_dataloader(client, "val")))


# -- losses and scores -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [llama, lambda: bert(num_labels=3)], ids=["causal", "classes"])
def test_the_loss_is_that_of_transformers_trainer(make, tmp_path):
    model, data = make(), texts() if make is llama else classes()
    batch = first_batch(data)
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model, args)
    expected = trainer.compute_loss(model.eval(), dict(batch))
    torch.testing.assert_close(HFModule(model).eval().training_step(batch, 0), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [llama, lambda: bert(num_labels=3)], ids=["causal", "classes"])
def test_a_smoothed_loss_is_that_of_transformers_trainer(make, tmp_path):
    model, data = make().eval(), texts() if make is llama else classes()
    batch = first_batch(data)
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, label_smoothing_factor=0.2)
    expected = transformers.Trainer(model, args).compute_loss(model, dict(batch))
    module = HFModule.from_trainer(model, args).eval()
    torch.testing.assert_close(module.training_step(batch, 0), expected, atol=1e-6, rtol=0)
    assert differs({"loss": expected}, {"loss": HFModule(model).eval().training_step(batch, 0)})


@pytest.mark.parametrize(
    "make",
    [llama, bert, lambda: t5(), lambda: peft_llama(), lambda: peft_llama(use_dora=True)],
    ids=["llama", "bert", "t5", "lora", "dora"],
)
def test_weight_decay_is_of_what_transformers_decays(make):
    module = HFModule(make(), weight_decay=0.1)
    (decayed,) = (group["params"] for group in module.configure_optimizers().param_groups if group["weight_decay"])
    args = transformers.TrainingArguments("unused", report_to=[], use_cpu=True)
    theirs = transformers.Trainer(module.model, args).get_decay_parameter_names(module.model)
    named = {name: entry for name, entry in module.model.named_parameters() if entry.requires_grad and name in theirs}
    assert {id(entry) for entry in decayed} == {id(entry) for entry in named.values()}


def test_columns_that_the_model_does_not_take_are_left_out():
    module, batch = HFModule(bert(num_labels=3)).eval(), first_batch(classes())
    same({"loss": module.training_step(batch, 0)}, {"loss": module.training_step({**batch, "idx": torch.arange(2)}, 0)})


@pytest.mark.parametrize("make", [llama, lambda: bert(num_labels=3)], ids=["causal", "classes"])
def test_compute_metrics_is_asked_about_a_whole_split(make, tmp_path):
    def compute_metrics(prediction):
        logits, labels = prediction
        return {"sum": float((logits.argmax(-1) * (labels != -100)).sum()), "labels": float((labels != -100).sum())}

    module, data = HFModule(make(), compute_metrics=compute_metrics), texts() if make is llama else classes()
    trainer = federate(module, data, [FedAvg()], tmp_path, max_rounds=1)
    rows = {(row.client, row.metric): row.value for row in trainer.rows if row.stage == "G" and row.split == "val"}
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, per_device_eval_batch_size=1)
    loader = data.client_dataloader("a", "val")
    model = trainer.module().model
    judge = transformers.Trainer(model, args, compute_metrics=compute_metrics, data_collator=loader.collate_fn)
    theirs = judge.evaluate(loader.dataset)
    assert rows["a", "val_sum"] == theirs["eval_sum"] and rows["a", "val_labels"] == theirs["eval_labels"] > 0


def test_a_score_of_compute_metrics_goes_before_ours_of_its_name(tmp_path):
    module = HFModule(bert(num_labels=3), compute_metrics=lambda prediction: {"accuracy": 0.3125})
    trainer = federate(module, classes(), [FedAvg()], tmp_path, max_rounds=1)
    assert {row.value for row in trainer.rows if row.metric == "val_accuracy"} == {0.3125}


def test_perplexity_is_over_all_tokens_and_not_a_mean_of_batches():
    module, data = HFModule(llama()).eval(), texts(batch_size=1)
    nll, hits, tokens = 0.0, 0, 0
    with torch.no_grad():
        for batch in data.client_dataloader("a", "train"):
            module.validation_step(batch, 0)
            logits, target = module.model(batch["input_ids"]).logits[0, :-1], batch["input_ids"][0, 1:]
            nll += float(F.cross_entropy(logits, target, reduction="sum"))
            hits, tokens = hits + int((logits.argmax(-1) == target).sum()), tokens + len(target)
    scores = module.val_metrics["tokens"].compute()
    assert tokens == sum(min(len(text), 23) for text in TEXTS["a"])
    assert scores["loss"].item() == pytest.approx(nll / tokens, rel=1e-5)
    assert scores["perplexity"].item() == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert scores["accuracy"].item() == pytest.approx(hits / tokens)


def test_models_of_other_kinds_are_scored_without_a_shift():
    tokens = bert(transformers.BertForTokenClassification, num_labels=5)
    module = HFModule(tokens).eval()
    batch = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.tensor([[0, 1, 2, -100], [3, 4, -100, -100]])}
    assert not module.shifts and module.count_tokens(batch) == 5
    module.validation_step(batch, 0)
    expected = F.cross_entropy(tokens(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(module.val_metrics["tokens"].compute()["loss"], expected.detach())
    decoder = HFModule(t5())
    assert not decoder.shifts and HFModule(llama()).shifts and HFModule(peft_llama()).shifts
    assert torch.isfinite(decoder.training_step({"input_ids": batch["input_ids"], "labels": batch["labels"]}, 0))


def test_scores_of_a_federation_of_classifiers(tmp_path):
    trainer = federate(HFModule(bert(num_labels=3), lr=1e-3), classes(), [FedAvg()], tmp_path, max_rounds=1)
    found = {row.metric for row in trainer.rows}
    assert {"val_accuracy", "val_f1_macro", "test_loss"} <= found and "val_perplexity" not in found


# -- training ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"schedule": "linear", "warmup": 2, "weight_decay": 0.1}])
def test_one_client_is_lightning_s_own_fit(options):
    module, data = HFModule(llama(), lr=1e-3, **options), texts()
    alone = TextDataModule({"a": ([{"text": text} for text in TEXTS["a"]],)}, ByteTokenizer(), 2, 24)
    trained = federate(module, alone, [FedAvg()], max_rounds=2, local_epochs=2, optimizer_state="keep")
    plain = plain_fit(module, alone, "a", epochs_per_round=2, max_epochs=4)
    same(global_state(trained), plain)
    assert differs(plain, module_state(module)) and data.client_ids == ["a", "b", "c"]


def test_steps_are_those_of_transformers_trainer(tmp_path):
    """With the same batches, without clipping: AdamW with decay of matrices, linear schedule with warm-up."""
    rows = [{"input_ids": list(b"some words"), "labels": list(b"some words")} for _ in range(8)]
    options = {
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": 0.0,
        "optim": "adamw_torch",
    }
    args = transformers.TrainingArguments(
        str(tmp_path),
        report_to=[],
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        **options,
    )
    theirs = llama()
    transformers.Trainer(
        theirs, args, train_dataset=rows, data_collator=TextDataModule({"a": (rows,)}).collator
    ).train()
    with pytest.warns(UserWarning, match=r"num_train_epochs=2 \(FederatedTrainer\(local_epochs=...\) and max_rounds\)"):
        module = HFModule.from_trainer(llama(), args)
    ours = federate(module, TextDataModule({"a": (rows,)}, batch_size=2), [FedAvg()], max_rounds=1, local_epochs=2)
    close({f"model.{name}": value for name, value in module_state(theirs).items()}, global_state(ours), atol=2e-6)
    assert differs(global_state(ours), module_state(module))


def test_a_model_as_from_pretrained_gives_it_trains_with_its_dropout(tmp_path):
    bert(num_labels=3).save_pretrained(tmp_path)
    module = HFModule(transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path), lr=1e-2)
    assert all(part.training for part in module.modules())
    fresh = HFModule(bert(num_labels=3), lr=1e-2)
    same(*(global_state(federate(one, classes(), [FedAvg()], max_rounds=1)) for one in (module, fresh)))


def test_arguments_without_a_counterpart_are_named(tmp_path):
    def read(**options):
        return HFModule.from_trainer(
            llama(), transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **options)
        )

    with pytest.warns(UserWarning, match=r"neftune_noise_alpha=5 \(no counterpart\)") as caught:
        module = read(neftune_noise_alpha=5, lr_scheduler_type="cosine", learning_rate=2e-4, optim="sgd")
    assert (module.hparams.schedule, module.hparams.lr, module.hparams.optimizer) == ("cosine", 2e-4, "sgd")
    (said,) = (str(one.message) for one in caught if "Not read" in str(one.message))
    assert "accelerator_config" not in said and "disable_tqdm" not in said  # which nobody has set
    with pytest.raises(ValueError, match=r"no counterpart of .*adafactor"):
        read(optim="adafactor")


# -- adapters ----------------------------------------------------------------------------------------------------------
def peft_llama(**options):
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options
    return peft.get_peft_model(llama(), peft.LoraConfig(**config))


@pytest.mark.parametrize("method", [FedIT, FFALoRA, RoLoRA])
def test_a_peft_model_is_taken_as_it_is(method):
    """What trains travels and nothing else; the mean is that of the same adapters as ours."""
    module = HFModule(peft_llama(), lr=1e-2)
    trainer, spy = spied(module, texts(), [method(r=None)], max_rounds=2)
    trains = {name for name, entry in module.named_parameters() if entry.requires_grad}
    assert len(trains) == 8 and set(spy.messages[0].state) == {
        n for n in trains if method is not FFALoRA or "lora_B" in n
    }
    start = module_state(module)
    assert all((name in trains) or torch.equal(start[name], value) for name, value in global_state(trainer).items())
    assert differs(start, global_state(trainer))


def test_parts_that_peft_saves_travel_with_the_adapters():
    model = peft.get_peft_model(
        bert(num_labels=3),
        peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"], task_type="SEQ_CLS"),
    )
    _, spy = spied(HFModule(model, lr=1e-2), classes(), [FedIT(r=None)], max_rounds=1)
    names = set(spy.updates[0].state)
    assert {name.split(".")[-3] for name in names if "lora" in name} == {"lora_A", "lora_B"}
    assert sum("classifier.modules_to_save.default" in name for name in names) == 2 and len(names) == 6


def test_ia3_vectors_and_dora_travel_too():
    ia3 = peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    for config in (ia3, peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM")):
        module = HFModule(peft.get_peft_model(llama(), config), lr=1e-2)
        trainer, spy = spied(module, texts(), [FedIT(r=None)], max_rounds=1)
        assert set(spy.updates[0].state) == {name for name, entry in module.named_parameters() if entry.requires_grad}
        assert differs(module_state(module), global_state(trainer))


def test_adapters_that_cannot_be_averaged_are_refused():
    data, tied = texts(), peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    ada = peft.AdaLoraConfig(init_r=4, total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for module, method, words in (
        (HFModule(peft.get_peft_model(llama(), ada)), FedIT(r=None), "AdaLoRA, whose ranks change"),
        (
            HFModule(peft.get_peft_model(llama(tie_word_embeddings=True), tied)),
            FedIT(r=None),
            "is tied to .*embed_tokens",
        ),
        (HFModule(peft_llama()), FedExLoRA(r=2), r"has adapters of peft already.*FedIT\(r=None\)"),
        (HFModule(peft_llama(use_dora=True)), FLoRA(r=2), r"has adapters of peft already.*FedIT\(r=None\)"),
        (HFModule(llama()), FedIT(r=None), "has no adapters: everything trains"),
    ):
        with pytest.raises(ValueError, match=words):
            federate(module, data, [method], max_rounds=1)


def test_ours_fit_into_a_model_of_transformers():
    """Gradient checkpointing with a frozen embedding, in bf16: every second factor still moves."""
    model = llama()
    model.gradient_checkpointing_enable()
    module = HFModule(model, lr=1e-2)
    trainer, spy = spied(
        module, texts(), [FedIT(r=2, target_modules=["q_proj", "v_proj"])], max_rounds=1, precision="bf16-mixed"
    )
    state = global_state(trainer)
    moved = [name for name in state if "lora_B" in name and state[name].any()]
    assert len(moved) == 4 and all(set(update.state) == set(spy.messages[0].state) for update in spy.updates)


# -- data --------------------------------------------------------------------------------------------------------------
def test_only_the_response_and_its_end_are_targets():
    rows = [{"prompt": "2+2=", "response": "4"}, {"prompt": "long prompt: ", "response": "yes"}]
    batch = next(iter(TextDataModule({"a": (rows, rows)}, ByteTokenizer(), 2).client_dataloader("a", "val")))
    kept = [[token for token in row if token != -100] for row in batch["labels"].tolist()]
    assert kept == [[ord("4"), 256], [*b"yes", 256]]
    assert batch["attention_mask"].sum(1).tolist() == [6, 17] and batch["input_ids"][0, 6:].eq(257).all()


def test_packed_texts_are_cut_into_rows_of_one_length():
    rows = [{"text": "abc"}, {"text": "defgh"}, {"text": "ijk"}]
    data = TextDataModule({"a": (rows, rows[:2])}, ByteTokenizer(), 8, max_length=4, packing=True)
    (batch,) = data.client_dataloader("a", "train")
    packed = [[97, 98, 99, 256], [*b"defg"], [104, 256, 105, 106], [107, 256, 257, 257]]
    assert sorted(batch["input_ids"].tolist()) == sorted(packed)
    assert "each moves all rows after it" in data.coupled_records and not texts().coupled_records
    whole = batch["attention_mask"] == 1
    assert torch.equal(batch["input_ids"][whole], batch["labels"][whole]) and batch["labels"][~whole].eq(-100).all()
    with pytest.raises(ValueError, match="packing=True makes every token a target"):
        TextDataModule({"a": ([{"prompt": "1+1=", "response": "2"}],)}, ByteTokenizer(), packing=True)


def test_a_collator_of_transformers_makes_the_batches():
    tokenizer = copy.copy(ByteTokenizer())
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5, 6], "labels": [4, 5, 6]}]
    data = TextDataModule({"a": (rows, rows)}, tokenizer, 2, collator=transformers.default_data_collator)
    assert next(iter(data.client_dataloader("a", "val")))["labels"].tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(ValueError, match=r"Row 0 of client 'a' \(train\) has the columns \['words'\]"):
        TextDataModule({"a": ([{"words": "x"}],)}, tokenizer)
    with pytest.raises(ValueError, match="Client 'b' has no training text"):
        TextDataModule({"a": (rows,), "b": ([], rows)}, tokenizer)


def test_rows_that_were_tokenized_elsewhere_keep_what_is_theirs():
    """Classes in a column `label`, pairs of sentences, padding of the tokenizer's own: as a Trainer's data set has them."""
    datasets = pytest.importorskip("datasets")
    rows = [
        {
            "text": "a",
            "label": 1,
            "input_ids": [5, 6, 7, 0],
            "token_type_ids": [0, 0, 1, 0],
            "attention_mask": [1, 1, 1, 0],
        },
        {
            "text": "b",
            "label": 0,
            "input_ids": [0, 0, 8, 9],
            "token_type_ids": [0, 0, 0, 1],
            "attention_mask": [0, 0, 1, 1],
        },
    ]
    for given in (rows, datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows).with_format("torch")):
        batch = next(iter(TextDataModule({"a": (given, given)}, batch_size=2).client_dataloader("a", "val")))
        assert {name: value.tolist() for name, value in batch.items()} == {
            "input_ids": [[5, 6, 7], [8, 9, 0]],
            "attention_mask": [[1, 1, 1], [1, 1, 0]],
            "token_type_ids": [[0, 0, 1], [0, 1, 0]],
            "labels": [1, 0],
        }
    pairs = [
        {"input_ids": [5, 6, 7], "labels": [1]},
        {"input_ids": [5], "labels": [1, 2]},
    ]  # of an encoder and a decoder
    batch = next(iter(TextDataModule({"a": (pairs, pairs)}, batch_size=2).client_dataloader("a", "val")))
    assert batch["labels"].tolist() == [[1, -100], [1, 2]] and batch["input_ids"].tolist() == [[5, 6, 7], [5, 0, 0]]


# -- the frozen network is kept once -----------------------------------------------------------------------------------
def exported(tmp_path, method=None, **options):
    module = HFModule(llama(), lr=1e-2)
    method = method or FedIT(r=2, target_modules=["q_proj", "v_proj"], head="model.lm_head")
    return module, federate(module, texts(), [method], tmp_path, max_rounds=2, name="a", save_state=1, **options)


def test_records_and_saved_states_hold_no_frozen_network(tmp_path):
    module, trainer = exported(tmp_path)
    frozen = {name for name, kind in trainer.server.kinds.items() if kind == "frozen"}
    assert len(frozen) > 15 and not any(frozen & trainer.store.get(client).personal.keys() for client in "abc")
    base = trainer.server.blueprint.base("")
    assert all(trainer.server.model[name].data_ptr() == base[name].data_ptr() for name in frozen)  # one memory
    folder, sizes = trainer.run.path / "checkpoints/last", {}
    for kind in ("server", "records"):
        sizes[kind] = max(file.stat().st_size for file in folder.glob(f"{kind}-000002*.safetensors"))
    # the head and adapters of one model and of three clients; a network is 460,000 bytes
    assert sizes["server"] < 120_000 and sizes["records"] < 350_000, sizes
    resumed = make_trainer(
        tmp_path,
        [FedIT(r=2, target_modules=["q_proj", "v_proj"], head="model.lm_head")],
        max_rounds=3,
        name="a",
        save_state=1,
    )
    resumed.fit(HFModule(llama(), lr=1e-2), datamodule=texts(), resume="last")
    method = FedIT(r=2, target_modules=["q_proj", "v_proj"], head="model.lm_head")
    same(global_state(resumed), global_state(federate(module, texts(), [method], max_rounds=3)))


def test_a_changed_frozen_entry_is_kept_by_its_client():
    """FLoRA merges into the network: what it has changed is not a base any more."""
    trainer = federate(HFModule(llama(), lr=1e-2), texts(), [FLoRA(r=2, target_modules=["q_proj"])], max_rounds=2)
    kept = set(trainer.store.get("a").personal)
    assert {name for name in kept if name.endswith("base_layer.weight")} == {
        f"model.model.layers.{number}.self_attn.q_proj.base_layer.weight" for number in (0, 1)
    }


def test_checkpoints_name_their_frozen_network_by_its_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "LEAST", 1000)
    _, trainer = exported(tmp_path)
    folder = trainer.run.path / "checkpoints"
    (base,) = folder.rglob("base-*.pt")
    whole = sum(value.numel() for value in module_state(trainer.module()).values())
    assert measures.model_size(load_run(trainer.run.path)).number == whole
    (trainer.run.path / "config.yaml").write_text("{}")  # a run of a script has none
    assert card([str(trainer.run.path), "--out", str(tmp_path / "card")]) == 0
    same(
        module_state(fedlightning.load(tmp_path / "card/checkpoints/global.ckpt", trust=["transformers"])),
        module_state(trainer.module()),
    )
    assert (folder / "global.ckpt").stat().st_size < base.stat().st_size
    opened = fedlightning.load(folder / "global.ckpt", trust=["transformers"])
    same(module_state(opened), module_state(trainer.module()))
    state = module_state(trainer.module())
    same(state, module_state(trainer.module()))  # what was written has its network still
    base.rename(tmp_path / "elsewhere.pt")
    with pytest.raises(ValueError, match=r"is in base-.*\.pt, which is neither beside it nor"):
        fedlightning.load(folder / "global.ckpt", trust=["transformers"])
    same(module_state(fedlightning.load(folder / "global.ckpt", HFModule(llama()), trust=["transformers"])), state)
    other = HFModule(llama())
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1.0
    with pytest.raises(ValueError, match="its adapters would mean nothing there"):
        fedlightning.load(folder / "global.ckpt", other, trust=["transformers"])


def test_a_model_that_a_site_sends_finds_its_frozen_network(tmp_path, monkeypatch):
    """A site writes the network beside its own file; where there is no global model nobody wrote it here."""
    monkeypatch.setattr(checkpoints, "LEAST", 1000)
    method = FedSALoRA(r=2, target_modules=["q_proj"])
    _, trainer = exported(tmp_path, method)
    file = trainer.run.path / "checkpoints/clients/a.ckpt"
    (tmp_path / "here/clients").mkdir(parents=True)
    answer = Brought(trainer.server, tmp_path / "here").keep(Deployed("a", content=read_tensors(file)))
    opened = fedlightning.load(answer.path, trust=["transformers"])
    same(module_state(opened), module_state(trainer.module("a")))


def test_an_export_of_adapters_that_were_there_opens_and_is_begun_with(tmp_path, monkeypatch):
    """Its entries have the module's own names, and those of the frozen network were empty in both."""
    monkeypatch.setattr(checkpoints, "LEAST", 1000)
    module, method = HFModule(peft_llama(), lr=1e-2), FedIT(r=None)
    trainer = federate(module, texts(), [method], tmp_path, max_rounds=1, name="a")
    file, state = trainer.run.path / "checkpoints/global.ckpt", module_state(trainer.module())
    other = HFModule(peft_llama())
    with torch.no_grad():
        next(other.parameters()).zero_()
    same(module_state(fedlightning.load(file, other)), state)
    begun = make_trainer(None, [FedIT(r=None)], max_rounds=1, init_from=file)
    begun.fit(HFModule(peft_llama(), lr=1e-9), datamodule=texts())
    close(global_state(begun), state)
    next(file.parent.glob("base-*.pt")).unlink()
    same(module_state(fedlightning.load(file, HFModule(peft_llama()))), state)
    with pytest.raises(ValueError, match="its adapters would mean nothing there"):
        fedlightning.load(file, HFModule(llama_of_zeros()))
    with pytest.raises(
        ValueError, match=r"init_from=.* cannot be begun with: the frozen network that it belongs to is in"
    ):
        make_trainer(None, [FedIT(r=None)], max_rounds=1, init_from=file).fit(module, datamodule=texts())


def llama_of_zeros():
    model = peft_llama()
    with torch.no_grad():
        next(model.parameters()).zero_()
    return model


def test_peft_opens_what_is_written(tmp_path):
    _, trainer = exported(None)
    federated = trainer.module().eval()
    save_peft(federated, tmp_path, llama())
    opened = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    tokens = torch.arange(20).view(2, 10)
    torch.testing.assert_close(opened(tokens).logits, federated.model(tokens).logits)
    assert differs({"x": opened(tokens).logits}, {"x": llama().eval()(tokens).logits})
    merged = federate(
        HFModule(llama(), lr=1e-2), texts(), [FLoRA(r=2, target_modules=["q_proj"])], max_rounds=1
    ).module()
    with pytest.raises(ValueError, match="FLoRA and FedExLoRA change the network"):
        save_peft(merged, tmp_path, llama())


class HalfUsed(Toy):
    """A branch that the loss does not reach."""

    def make(self, hidden, dropout):
        return torch.nn.ModuleList([torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)])

    def forward(self, x):
        return self.net[0](x) + self.net[1](x).detach()


def test_adapters_without_a_gradient_are_found_before_round_1():
    with pytest.raises(ValueError, match=r"FedIT trains 'net.1.lora_B.default.weight', which got no gradient"):
        federate(HalfUsed(), toy_data(), [FedIT(r=2)], sanity_check=True)
    assert federate(HalfUsed(), toy_data(), [FedIT(r=2, target_modules=["net.0"])], sanity_check=True, max_rounds=1)
