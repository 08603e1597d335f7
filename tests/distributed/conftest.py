"""Being here, put this folder on the path: tests of integrations/ start workers by launching.py, too."""
