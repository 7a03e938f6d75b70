"""What version 0.1.0 has left behind, finished and killed, for the versions after it to know again."""
