"""The report of a comparison: one HTML file, figures for print, and the numbers behind them."""

from fedlightning.report.build import build_report

__all__ = ["build_report"]
