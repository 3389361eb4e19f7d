"""Engines decide where clients work: their contract, tries, clients' records, and one client after another."""
