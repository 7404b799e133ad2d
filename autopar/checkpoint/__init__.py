"""Checkpoints: a model and its optimizer in files that any plan, any number of ranks and one process can read.

What each rank holds turns into pieces of whole tensors (``parts``), the writing of which ranks that hold the same share
(``save``); loading cuts what another plan's ranks hold out of them (``load``). Files are those of torch's distributed
checkpoints, so torch reads them as well, and a save that was cut short never replaces one that is complete (``files``).
What is loaded may also come from ranks that hold it, in messages (``live``, ``exchange``); a loop under ``torchrun``
saves and loads by itself (``elastic``).
"""
