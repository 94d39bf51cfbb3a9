"""Collectives and schedules: one function, computed by many devices. Knows axis names and functions, not layers."""
