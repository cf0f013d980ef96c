"""Ties to other libraries, each in a module of its own that alone imports that library."""
