"""Passes over the captured program, one a file: each takes a valid program and leaves a valid one.

:func:`autopar.capture.flatten.passes` lists them in order. A pass is a function with the name of its file; what it is
given besides the program is bound in the list.
"""
