"""Python imports this at its start, if its directory is on PYTHONPATH: `kernels="auto"` then means
"torch"."""

import importlib.abc
import importlib.util
import sys


class _TorchKernels(importlib.abc.MetaPathFinder):
    """Changes MoEConfig when its module is imported, in child processes, too."""

    def find_spec(self, name, path, target=None):
        if name != "moe_core.config":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module) -> None:
            execute(module)
            check = module.MoEConfig.__post_init__

            def check_and_change(config) -> None:
                check(config)
                if config.kernels == "auto":
                    object.__setattr__(config, "kernels", "torch")  # it is frozen

            module.MoEConfig.__post_init__ = check_and_change

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, _TorchKernels())
