"""The command line: ``autopar plan``, ``show``, ``fleet``, ``verify``, ``profile`` and so on.

Arguments turn into a model, example inputs and a cluster; the rooms do the rest. Nothing heavy is imported before a
command needs it.
"""
