"""Published tables, run again: what `fedlightning reproduce` reads, runs, measures, judges and keeps.

`tables` reads a table from its YAML file. `runs` turns its runs into complete configurations, each with a name by which it is
found again. `measures` takes a number from a finished run's files, `results` judges it and puts a table together, `record`
keeps the verdicts that are committed with it, and `page` shows it all.
"""
