"""Flower beneath sites: its SuperLink and SuperNodes carry requests and replies. Nothing else of this package imports it.

No code travels. Flower wants an app bundle for every run and would have sites execute it; ours is fixed (`bundle.py`), a site
refuses any other by its hash, and executes none: the process of `fedlightning site` takes the messages itself.
"""
