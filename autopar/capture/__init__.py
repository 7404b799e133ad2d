"""From a module and example inputs to a flat program and the planner's graph.

``torch.export`` runs the model on fake tensors, each repeated block once (``repeats``); named passes (``passes``) turn
what it recorded into one flat program, and lowering turns that into the :class:`~planner.ir.graph.Graph` that is
planned. The user's model is left as it was found (``model_state``).
"""
