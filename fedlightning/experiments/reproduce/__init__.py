"""Published tables, run again: what `fedlightning reproduce` reads, runs, measures, judges and keeps.

`tables` reads a table from its YAML file. `runs` turns its runs into complete configurations with a name by which they are
found again. `measures` takes a number from a finished run's files, `verdicts` judges it, `results` puts a table together,
`record` keeps the verdicts that are committed with a table, and `page` shows it all.
"""
