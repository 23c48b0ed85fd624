"""A small model, trained in this repository, so that everything runs without a download."""
