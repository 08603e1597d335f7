"""Its place is what matters: pytest puts this folder on the path, so tests can say ``from support import ...``."""
