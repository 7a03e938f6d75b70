"""Files that version 0.1.0 wrote, from finished and killed jobs, which later versions must be able to read."""
