"""The two recipes that users call, ``plan`` and ``parallelize``, and the agreement between ranks that they need.

A module and a cluster turn into a plan, and a plan into a distributed module; every step is a call into another room.
"""
