"""The state of the user's model before capture, and its restoration afterwards."""
