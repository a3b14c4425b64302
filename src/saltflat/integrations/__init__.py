"""Trajectory terms in other training frameworks, a module each; this package needs none of them."""
