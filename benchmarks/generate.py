"""How fast do `cw.deploy.generate` and `transformers` write, in float32 on the CPU?

    python benchmarks/generate.py            # needs torch and transformers; minutes, on a quiet machine
    python benchmarks/generate.py --small    # a net of 2 million parameters alone

GPT-2 of random weights, which are the same in both, goes on with 1 and with 8 prompts of 60 tokens, by 200
tokens, the most probable each time. A row has the tokens a second and the seconds until the first token, the
median of five calls in turns and the range; compiling is not counted, nor is the first call of each. `batch`:
prompts that are computed together; `transformers` computes all together, so the prompts have one length. Both
use all cores. The tokens are compared.
"""

import argparse
import statistics
import tempfile
import time

import jax
import numpy as np
import torch
import transformers

import chipwise as cw

NEW, PROMPT, CALLS = 200, 60, 5
SIZES = {"2 million": (512, 4, 128, 4, 8192), "124 million": (1024, 12, 768, 12, 50_257)}


def nets(context, depth, width, heads, vocabulary):
    """The net of `transformers`, and the same one as a trained model."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=context, n_embd=width, n_layer=depth, n_head=heads,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for name, tensor in theirs.state_dict().items():
        if tensor.ndim > 1:  # as large as it takes to say different things
            tensor.mul_(10 if "wpe" in name else 3)
    sizes = {"context": context, "depth": depth, "width": width, "heads": heads, "vocabulary": vocabulary}
    settings = [f"{name}={value}" for name, value in {**sizes, "precision": "f32"}.items()]
    recipe = cw.load("gpt2-124m", settings, synthetic=True)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        params, state = jax.jit(cw.pretrained(folder, names="gpt2").start(recipe.task).init)(
            jax.random.key(0)
        )
    return theirs, cw.deploy.Trained(recipe, jax.tree.map(np.asarray, params), state)


def by_transformers(net, prompts):
    """Tokens, seconds of `NEW` tokens, and seconds of the first."""
    given = {"attention_mask": torch.ones(len(prompts), PROMPT), "do_sample": False, "pad_token_id": 0}

    def timed(new):
        began = time.perf_counter()
        with torch.no_grad():
            told = net.generate(torch.tensor(prompts), max_new_tokens=new, **given)
        return told[:, PROMPT:].tolist(), time.perf_counter() - began

    first = timed(1)[1]
    tokens, seconds = timed(NEW)
    return tokens, seconds, first


def by_chipwise(known, prompts, batch):
    how = {"tokens": NEW, "temperature": 0, "batch": batch, "on": cw.On(devices=1)}
    told = cw.deploy.generate(known, prompts, **how)
    return [list(tokens) for tokens in told.tokens], told.seconds, told.first_seconds


def spread(values, digits=1):
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main():
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--small", action="store_true")
    small = read.parse_args().small
    print(
        f"JAX {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, ", end=""
    )
    print(f"{torch.get_num_threads()} threads\n")
    columns = ("parameters", "prompts", "by", "tokens/s", "first token, s", "the same tokens")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, sizes in list(SIZES.items())[: 1 if small else None]:
        theirs, known = nets(*sizes)
        for count in (1, 8):
            prompts = np.random.default_rng(0).integers(0, sizes[-1], (count, PROMPT)).tolist()
            ways = {"transformers": lambda: by_transformers(theirs, prompts)}
            ways |= {"chipwise": lambda: by_chipwise(known, prompts, None)}
            if count > 1:
                ways |= {f"chipwise, batch={count}": lambda: by_chipwise(known, prompts, count)}
            calls = [{way: f() for way, f in ways.items()} for _ in range(1 + CALLS)][1:]
            wanted = calls[0]["transformers"][0]
            for way in ways:
                told = [call[way] for call in calls]
                rates, firsts = [count * NEW / one[1] for one in told], [one[2] for one in told]
                same = sum(
                    a == b for x, y in zip(told[0][0], wanted, strict=True) for a, b in zip(x, y, strict=True)
                )
                cells = [name, count, way, spread(rates), spread(firsts, 3), f"{same} of {count * NEW}"]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
