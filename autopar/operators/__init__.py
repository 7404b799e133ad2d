"""What models are written with: operators of our own, each whole in a graph and planned whole; and delinked layers."""
