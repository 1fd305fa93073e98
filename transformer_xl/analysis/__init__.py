"""Analyses of a trained model: the context it uses, the value of its memory, and where its heads attend."""
