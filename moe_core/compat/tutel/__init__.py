"""Tutel's programming interface on this engine: its users' programs run unchanged.

    PYTHONPATH=$(python -m moe_core.compat.tutel) python helloworld.py

The command prints the directory in which `import tutel` finds this package. In a program of your
own:

>>> from moe_core.compat.tutel import moe, net, system
>>> env = system.init_data_model_parallel(backend="gloo")
>>> layer = moe.moe_layer(
...     gate_type={"type": "top", "k": 2},
...     model_dim=512,
...     experts={"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 2048},
... )
>>> y = layer(torch.randn(4, 196, 512))
>>> loss = y.square().mean() + 0.01 * y.l_aux

What is mapped, and what raises: docs/how-to/replace-tutel.md. State dicts have Tutel's names;
`moe_core.tutel` converts them to MoELayer's and to other numbers of ranks.
"""
