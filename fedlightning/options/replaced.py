"""What has taken the place of arguments and attributes that the trainer does not have, and of LightningCLI."""

_MOVED = {
    "engine": {"workers": "Processes(workers=...)", "clients_per_stack": "Vectorized(clients_per_stack=...)"},
    "failures": {
        "on_client_error": "FailurePolicy(on_error=...)",
        "client_retries": "FailurePolicy(retries=...)",
        "min_clients": "FailurePolicy(min_clients=...)",
        "client_timeout": "FailurePolicy(timeout=...)",
        "update_limit": "FailurePolicy(update_limit=...)",
    },
    "evaluation": {
        "evaluate_every": "Evaluation(every=...)",
        "evaluate_seconds": "Evaluation(seconds=...)",
        "evaluate_clients": "Evaluation(clients=...)",
        "evaluate_data": "Evaluation(data=...)",
        "stages": "Evaluation(stages=...)",
        "test_data": "Evaluation(test_data=...)",
    },
}
REPLACED = {
    name: f"{argument}.{value.partition('(')[2].partition('=')[0]}, in Python {argument}={value}"
    for argument, values in _MOVED.items()
    for name, value in values.items()
} | {
    "ray": "engine.address, engine.num_cpus, engine.num_gpus and engine.init, in Python engine=Ray(...)",
    # those of Lightning's Trainer
    "max_epochs": "max_rounds and local_epochs",
    "min_epochs": "local_epochs",
    "max_steps": "max_rounds and local_steps",
    "min_steps": "local_steps",
    "enable_checkpointing": "save_state (resume) and the callbacks LocalCheckpoint and GlobalCheckpoint (selection)",
    "ckpt_path": "init_from=FILE to begin with its weights, or fit(resume=FOLDER) to go on with a run",
    "num_sanity_val_steps": "sanity_check=False to leave out the trial before round 1",
    "enable_model_summary": "dry_run(model, data), which prints what the model holds and what a round sends",
    "enable_autolog_hparams": "logger, whose files have the hyper-parameters",
    "num_clients": "the partitioner's, as in Partitioned(data, IIDPartitioner(10)), or a loader for each client in fit",
    "partitioner": "Partitioned(data, partitioner) in fit",
    "algorithm": "callbacks=[FedProx(mu=0.1)]: every algorithm is a callback",
    "batch_size": "the data module's",
    "lr": "the module's, and lr_decay for a factor a round",
    "gpus": "accelerator and devices",
    "resume_from_checkpoint": "fit(resume=FOLDER) to go on with a run",
    "barebones": "local_loop='fast', logger=False, save_state=0 and enable_progress_bar=False",
    "model_registry": "the files in the run's folder, and fedlightning card",
}
"""Name -> what to use, as the end of a sentence."""
OF_COMMANDS = {
    "seed_everything": "trainer.seed, which also fixes the model's first weights",
    "optimizer": "configure_optimizers of the module, which may take optimizer: OptimizerCallable",
    "lr_scheduler": "configure_optimizers of the module, which may take scheduler: LRSchedulerCallable",
    "ckpt_path": "--resume FOLDER (go on), --trainer.init_from FILE (its weights), or fedlightning test --run FOLDER",
}
"""Option of LightningCLI beside its sections -> what to use."""
_SAFE = "nothing in its place: files of a run hold values only, no code"
_SCORED = {
    "dataloaders": "test_dataloaders={client: loader} in fit, or for other data Lightning's: "
    "Trainer().test(trainer.module(client), loader)",
    "weights_only": _SAFE,
}
OF_METHODS: dict[str, dict[str, str]] = {
    "fit": {
        "ckpt_path": "resume='last' or a run's folder to go on, or FederatedTrainer(init_from=FILE) to begin with weights",
        "weights_only": _SAFE,
        "dataloaders": "train_dataloaders={client: loader}",
    },
    "validate": {
        name: text.replace("test", "val", 1).replace(".test(", ".validate(") for name, text in _SCORED.items()
    },
    "test": _SCORED,
    "predict": {
        "model": "client=NAME, whose model predicts, or the global one without it",
        "datamodule": "predict(loader), or nothing: then it is the test data of the client",
        "ckpt_path": "checkpoint='best_local' or 'best_global', after restore(model, datamodule, FOLDER) where it is a run's",
        "return_predictions": "nothing in its place: they are returned",
        "weights_only": _SAFE,
    },
    "save_checkpoint": {"filepath": "path", "weights_only": _SAFE, "storage_options": "a path of this machine"},
}
"""Method -> argument of Lightning's that it lacks -> what to use."""
ATTRIBUTES = {
    "current_epoch": "rounds_done",
    "global_step": "rounds_done",
    "max_epochs": "max_rounds",
    "logger": "loggers",
    "log_dir": "run.path",
    "ckpt_path": "run.path",
    "checkpoint_callback": "run.path / 'checkpoints', where LocalCheckpoint and GlobalCheckpoint write",
    "lightning_module": "module() or module(client)",
    "model": "module() or module(client)",
    "logged_metrics": "callback_metrics, or rows for every client and round",
    "progress_bar_metrics": "callback_metrics, or rows for every client and round",
}
"""Attribute of Lightning's Trainer -> what to use."""


class RefusesLightningCLI(type):
    """Class of a trainer that LightningCLI(trainer_class=FederatedTrainer) refuses with this text."""

    def __format__(cls, spec: str) -> str:
        return f"{cls!r} (which has a command line of its own: write FederatedCLI(MyModule, MyData), no LightningCLI)"
