"""What a run leaves on disk: its folder, rows, resume state and exported checkpoints."""
