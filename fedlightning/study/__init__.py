"""Comparison of finished runs: tables, statistics and a report.

`study.Study` holds several methods and seeds and has all tables; `comparison.Comparison` compares runs of one session;
`report.build_report` writes the HTML page; `statistics` and `fairness` are the measures as plain functions.
"""
