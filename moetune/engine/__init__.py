"""The search loop: the one place where strategies, a backend and the clock meet. Loads no torch."""
