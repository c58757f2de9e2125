"""What a training on a folder of pictures starts from, and what is known of it. Without torch."""
