"""Define the networks of the published experiments, tiny and full."""
