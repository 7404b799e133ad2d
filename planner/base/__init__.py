"""What every other room stands on: errors that name the way out, units, text, and the schema of files people write.

Raw input (bytes as ``"80 GiB"``, YAML, numbers) turns into checked values and back into readable text. Numbers that
remember the formula they came from (``symbolic_int``, ``symbolic_float``) are here as well, since every sum may be
asked for its closed form. Nothing here knows of graphs, devices or plans.
"""
