"""A plan as plain data: encoding, checking, and comparing it with the model and cluster it is applied to.

An assignment turns into names and numbers (``account``), these into JSON and back (``encoding``, ``upgrade`` for files
of earlier versions), and a file into a document only after every field was checked (``validation``, ``entries``).
People edit these files, so what does not fit is refused with what would.
"""
