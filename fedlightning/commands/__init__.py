"""The commands of `fedlightning`. Each is imported when it is run; the entry point is `fedlightning.cli`."""

COMMANDS = {
    "fit": "Train a federation, test it and show the results.",
    "validate": "Score a finished or interrupted run on validation data.",
    "test": "Score a finished or interrupted run on test data.",
    "evaluate": "Score a given model at all clients without training, each with its samples and intervals.",
    "predict": "Write the predictions of a client's model, or of the global model, on test data.",
    "onboard": "Let new clients join a finished run: score them, fine-tune each, score them again.",
    "leakage": "Attack the models of a finished run: who was in the training data, and whose is a sample.",
    "serve": "Train a federation whose clients are at sites: other machines that keep their data.",
    "site": "Take part in a federation with data that stay here.",
    "sites": "Show who is connected to a server, at which round and since when; or what a site does.",
    "certificates": "Make certificates and keys for a server and its sites.",
    "compare": "Train several methods over several seeds, add baselines, write a report.",
    "sweep": "Search for the best values of options on validation data.",
    "reproduce": "Run published tables again: each cell agrees, disagrees, or why not.",
    "league": "Tune many methods with the same budget on validation data, and test them.",
    "watch": "Follow a run, or the runs of an experiment, on a page of this machine.",
    "report": "Compare finished runs: tables, figures and one HTML page.",
    "card": "Write a model card beside the models of a run, for the Hugging Face Hub.",
    "partition": "Show the samples of each client: a table, a picture and a CSV file.",
    "algorithms": "List the algorithms, or explain one.",
    "configs": "List the configurations that come with the package, or copy them.",
    "completion": "Print a script that completes commands and options in bash or zsh.",
}
"""Command -> what it does."""
