"""XLA compiles in half the time where JAX's optimizations are off, in tests and in processes that they start.

Half of the suite's time goes to compilers, and half of that to XLA's emitters of fusions, which lower each
one through MLIR, and to cutting a program's code in many modules. The older emitters, and one module, do as
well.
Python imports a module of this name, where it finds one, before anything else.
"""

import importlib.abc
import importlib.util
import sys

COMPILER = "jax._src.compiler"
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


class Hook(importlib.abc.MetaPathFinder):
    """Changes JAX's compiler when it is imported; a test may ask what chipwise alone imports."""

    def find_spec(self, name, path, target=None):
        if name != COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        executed = spec.loader.exec_module

        def exec_module(module):
            executed(module)
            options = module.get_compile_options

            def get_compile_options(*args, **kwargs):
                made = options(*args, **kwargs)
                backend = kwargs.get("backend")
                on_cpu = getattr(backend, "platform", None) == "cpu"
                if on_cpu and module.config.config.read("jax_disable_most_optimizations"):
                    made.env_option_overrides = [*made.env_option_overrides, *QUICK.items()]
                return made

            module.get_compile_options = get_compile_options

        spec.loader.exec_module = exec_module
        return spec


if not any(type(one).__name__ == "Hook" for one in sys.meta_path):
    sys.meta_path.insert(0, Hook())
