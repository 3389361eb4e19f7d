"""Many runs as one experiment: `compare`, `sweep`, `league` and `reproduce` are methods with seeds.

`plan` turns files and options into complete configurations before anything runs (`methods`). An `Experiment` makes those of
its runs that are missing, keeps their record in `study.json`, and goes on where it was interrupted. `children` gives every
run a process of its own, and `execute` runs a number of them at a time. `search` proposes values and judges them: a sweep is
an experiment of trials, the league one for every task and method, and a published table (`reproduce`) names its own runs.
"""
