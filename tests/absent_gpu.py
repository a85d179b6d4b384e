"""An H100 that is not here, for tests of kernels: `python absent_gpu.py DO ARGUMENT...` in a process of its
own, since XLA reads one file of kernels in a process. Prints JSON.

    keys                   nothing: XLA logs what a small net's kernels are called
    text [FILE [FREE]]     the net's compiled program, with the kernels of a file or without, exact or not
    timed                  the same for the programs whose kernels are timed
    load FILE              the code and the facts of the error for a file, if there is one
"""

import json
import re
import subprocess
import sys

import processes

LOGGED = re.compile(r"Autotune cache miss: key = (<key model='(.*?)', hlo='(.*?)', version=(\d+)>)", re.S)


def ask(*words, **more):
    """What the program in this file prints, and its log."""
    from chipwise.compile.processes import COMPILERS, compiler_environment

    made = COMPILERS["cuda"]()
    variables = processes.environment(**compiler_environment(made.platform, made.path))
    variables["PYTHONPATH"] = processes.search()
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, env=variables | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout), done.stderr


def entry(model, name, version, result):
    """An entry of a file of kernels, as XLA writes it."""
    model, name = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for text in (model, name)
    )
    return (
        f'results {{\n  device: "{model}"\n  hlo: "{name}"\n  result {{\n    {result}\n  }}\n'
        f"  version: {version}\n}}\n"
    )


def net(x, kernel, w):
    """The gradient of a convolution and a product."""
    import jax
    import jax.numpy as jnp

    def loss(kernel, w):
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jax.nn.relu(y).reshape(x.shape[0], -1)[:, :512] @ w)

    return jax.value_and_grad(loss, (0, 1))(kernel, w)


def main(do, *arguments):
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from chipwise.base import DeviceError
    from chipwise.chips.catalogue import named
    from chipwise.chips.gpus import target_config
    from chipwise.compile.exports import export_program
    from chipwise.machine import kernels
    from chipwise.machine.compiler import jitted
    from chipwise.run import tune

    kernels.LIBRARIES = ("jax", *kernels.LIBRARIES)  # so that a file has a comment for XLA to read
    jax.devices()
    about = {"target_config": target_config(named("h100")), "topology": "1x1x1"}
    (device,) = topologies.get_topology_desc("", "cuda", **about).devices
    file, free = (*arguments, "", "")[:2]
    if file:
        try:
            kernels.load(kernels.read(file), device, file)
        except DeviceError as error:
            return {"code": error.code, "facts": error.facts}
    if do == "load":
        return {}
    place = SingleDeviceSharding(device)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        for shape in ((64, 32, 32, 64), (3, 3, 64, 128), (512, 512))
    ]
    if do == "timed":
        for function, specs in ((kernels.product, (kernels.probe(),)), (net, shapes)):
            specs = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in specs]
            tune.compiled(export_program(function, specs, "cuda").body, device, "unwritten.textproto")
        return None
    if do == "keys":
        jitted(kernels.product, device).lower(kernels.probe(place)).compile()
    return jitted(net, device, exact=not free).lower(*shapes).compile().as_text()


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
