"""What all ranks of a mesh do alike: device mesh, sharded parameters, gathering, resharding, random state."""
