"""Comparison of finished runs: tables, statistics and a report.

`study.Study` holds several methods and seeds and has all tables; `comparison.Comparison` compares runs of one session;
`report.build_report` writes the HTML page; `significance` and `fairness_measures` are plain functions.
"""
