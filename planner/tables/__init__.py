"""Embedding tables: which rank holds which, and which rows are kept on the device of tables whose home is the host.

From the sizes of tables, how often their rows are looked up, and a cluster to a placement with a proven bound.
"""
