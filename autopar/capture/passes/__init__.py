"""Passes over the captured program, one a file: each takes a valid program and leaves a valid one."""
