"""Operators of our own: a model calls each as a function, and a graph holds it whole, since it is planned whole."""
