"""Simulate what a recipe would serve on a machine that is not at hand."""
