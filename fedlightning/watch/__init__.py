"""Looking at runs while they go on: what their files say (`reading.py`), as a page on this machine (`pages.py`)."""
