"""Profiles the machine at hand: kernels and collectives timed on it become a calibration of its cluster file.

Local processes are started where collectives are measured. What is measured replaces the figures of data sheets in
:mod:`planner.cost`.
"""
