"""Data on the host or on disk: executes the planner's transfer schedule, and updates where parameters are at home."""
