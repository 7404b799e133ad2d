"""Embedding tables offloaded to the host or to disk, with hot rows cached on the device; a module that trains them."""
