"""The commands behind `fedlightning`; each is imported when it is run. The entry point is `fedlightning.cli`."""

COMMANDS = {
    "fit": "Train a federation, test it and show the results.",
    "validate": "Score a finished or interrupted run on validation data.",
    "test": "Score a finished or interrupted run on test data.",
    "predict": "Write the predictions of one client's model, or of the global one, on its test data.",
    "compare": "Train several methods over several seeds, add baselines, write a report.",
    "sweep": "Search for the best values of options, on validation data alone.",
    "report": "Compare finished runs: tables, figures and one HTML page.",
    "partition": "Show which client gets which samples: a table, a picture and a CSV file.",
    "algorithms": "List the algorithms, or explain one.",
    "completion": "Print a script that completes commands and options in bash or zsh.",
}
"""Every command and what it does."""
