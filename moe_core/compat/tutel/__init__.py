"""Tutel's programming interface, implemented with this engine. Programs for Tutel run unchanged.

    PYTHONPATH=$(python -m moe_core.compat.tutel) python helloworld.py

The command in parentheses prints the directory in which `import tutel` finds this package. The
modules can also be imported by their names here:

>>> from moe_core.compat.tutel import moe, net, system
>>> env = system.init_data_model_parallel(backend="gloo")
>>> layer = moe.moe_layer(
...     gate_type={"type": "top", "k": 2},
...     model_dim=512,
...     experts={"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 2048},
... )
>>> y = layer(torch.randn(4, 196, 512))
>>> loss = y.square().mean() + 0.01 * y.l_aux

docs/how-to/replace-tutel.md lists the supported options, and those that raise an error. State dicts
have Tutel's names. `moe_core.tutel` converts them to MoELayer's names and to other numbers of
ranks.
"""
