"""Object stores: where things are, how they are reached, and how their bytes come and go (with obstore)."""
