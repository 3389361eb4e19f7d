"""The report's figures: one panel each, drawn from plain numbers."""
