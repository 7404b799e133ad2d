"""A parallel module inside other people's training loops: Accelerate, Transformers' Trainer, Lightning, TRL and PEFT.

Each module subclasses what the framework lets one subclass, and imports it; nothing else of autopar imports these, and
autopar needs none of them. What they have in common follows from one fact: *all processes of a plan compute one global
batch together*. So a data loader hands every process the whole batch, of which the module takes its part; a loss, a
norm of gradients and a metric are global as they are, and nothing is averaged over processes; what is saved is whole.
"""

FOLDER = "autopar"
"""Of a saved state: the checkpoint of the module and its optimizer, beside what a framework saves itself."""
