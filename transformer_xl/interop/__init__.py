"""Convert checkpoints of other programs: the authors' code (PyTorch, TensorFlow), Hugging Face's and NVIDIA's."""
