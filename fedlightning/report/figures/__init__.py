"""Figures of the report: one panel each, drawn from plain numbers."""
