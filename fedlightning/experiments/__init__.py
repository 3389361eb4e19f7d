"""Many runs as one experiment: `compare` (methods times seeds) and `sweep` (values times seeds).

`plan` turns files and options into complete configurations before anything runs. `children` gives every run a process
of its own, and `execute` runs a number of them at a time. `study_file` records which runs are done. `space` and `sweep`
choose values.
"""
