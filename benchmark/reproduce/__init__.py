"""Re-run the experiments of the sources under a gate that refuses impossible figures."""
