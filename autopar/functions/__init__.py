"""``torch.autograd.Function``s, which bring a backward of their own: each is called as one operator, so it runs."""
