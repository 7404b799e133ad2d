"""A plan as plain data: encoding, checking, and comparing it with the model and cluster it is applied to."""
