"""A small model that this repository trains itself, so that everything runs without a download."""
