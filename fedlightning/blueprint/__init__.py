"""What every model of a federation is built from: template, callbacks and settings; no data."""
