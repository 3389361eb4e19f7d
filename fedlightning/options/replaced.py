"""What has taken the place of arguments that the trainer does not have."""

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
}
"""Name -> what to use, as the end of a sentence."""
