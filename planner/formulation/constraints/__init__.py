"""What narrows the space before it is searched: the user's pins, the meshes that fit the cluster, the ZeRO stages."""
