"""Steps whose data is partly on the host or on disk: chunks, what a step moves, and how long it waits."""
