"""Integrations with other libraries: one module for each, the only one that imports that library."""
