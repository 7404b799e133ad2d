"""What runs the plan: local forms of operators, modules, pipelines, chunks. It decides nothing."""
