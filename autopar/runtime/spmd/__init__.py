"""What every rank of a mesh does alike: device mesh, sharded parameters and their gathering, resharding, random state."""
