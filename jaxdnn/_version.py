"""The version: pyproject.toml reads it from here, and the reports print it."""

__version__ = "0.1.0"
