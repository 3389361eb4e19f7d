"""Many runs as one experiment: `compare` (methods times seeds) and `sweep` (values times seeds).

`plan` turns files and options into complete configurations before anything runs; `children` gives every run a process
of its own; `execute` keeps them busy; `study_file` remembers what is done; `sweep` chooses values.
"""
