"""A report that people want to read: one HTML file, publication-ready figures, and the numbers behind them."""

from fedlightning.study.report.build import build_report

__all__ = ["build_report"]
