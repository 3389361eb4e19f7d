"""Files that are whole at every instant: written atomically, appended to, cut back to a mark."""
