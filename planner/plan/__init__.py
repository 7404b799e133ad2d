"""The document that people hold: a plan that prints, explains itself, is saved as JSON and loaded again.

What the search found turns into plain data (``document``), which loading checks before anything trusts it. ``report``
turns a plan into text, HTML and answers to why and why not; ``timeline`` draws its step.
"""
