"""Clients at sites: machines that share nothing with the server but a connection, and keep their data and records.

`engine.py` is the server's half, `site.py` that of a site; `link.py` says what a connection must do.
"""
