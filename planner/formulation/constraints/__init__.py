"""What narrows the space before it is searched: the user's pins, the meshes that fit the cluster, the ZeRO stages.

What a user writes turns into :class:`~planner.formulation.constraints.pins.Pins`, and pins into filters over strategies
and layouts (``filters``) and into the meshes that are tried (``mesh_candidates``). What contradicts itself, the model
or the cluster is refused here, by name and number, before a search begins.
"""
