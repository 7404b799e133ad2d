"""From a dataset to this rank's part of every global batch, and the check that ranks which hold the same data do."""
