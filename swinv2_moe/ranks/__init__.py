"""The processes of a run: who they are, what they agree on, and how a model is spread over them."""
