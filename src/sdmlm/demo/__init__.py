"""Demos that need no data and no download."""
