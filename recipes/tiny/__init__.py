"""Define a small model that is trained in this repository, so that everything runs without a download."""
