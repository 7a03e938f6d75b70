"""Vectors of texts and images: the models, the step that runs them over rows, and the files that they end in."""
