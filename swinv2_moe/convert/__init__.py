"""Convert weights of other programs to checkpoints of this project and back."""
