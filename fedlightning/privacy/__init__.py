"""What leaves clients: the list of it, and what holds every update to the list."""
