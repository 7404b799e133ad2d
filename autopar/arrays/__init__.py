"""Arrays of models: members of one structure trained as one module, whose parameters have a leading dim of members.

A member is captured once; each of its operators becomes one that computes all members at once. Such a module is
captured, planned and sharded as any other, and nothing that a member computes reads another.
"""
