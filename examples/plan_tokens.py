"""Tokens of a language model on chips that you do not have: latency, tokens/s, dollars a million.

    python examples/plan_tokens.py gpt2-124m --on t4=0.35,h100=3.90,v5e --texts 1,8,64

`t4=0.35`: a T4 costs 0.35 dollars an hour. Each chip's own compiler compiles two programs, of a prompt and of
one token more. Tokens/s include prompts. Recipes are in bf16 or f16. No measurement on a chip has tested
these figures.
"""

import argparse

import jax
import jax.numpy as jnp

import chipwise as cw

HALF = {"bf16": jnp.bfloat16, "f16": jnp.float16}


def programs(recipe, texts, prompt, length):
    """Computes prompts, and one token more of `texts` texts in a cache of `length` positions: functions, each
    with the shapes of its arguments."""
    row, block = ((texts,), jnp.int32), lambda n: jax.ShapeDtypeStruct((texts, n), jnp.int32)
    params, state = jax.eval_shape(recipe.task.init, jax.random.key(0))
    dtype = HALF.get(recipe.precision, jnp.float32)
    model = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, dtype), params), state

    def decode(model, tokens, position, cache=None):
        return recipe.task.decode(*model, tokens, cache, position)

    cache = jax.eval_shape(decode, model, block(length), jax.ShapeDtypeStruct(*row))[1]

    def prefill(model, tokens):
        empty = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), cache)
        return decode(model, tokens, jnp.zeros(*row), empty)[1]

    def token(model, cache, last, position):
        logits, cache = decode(model, last[:, None], position, cache)
        return cache, jnp.argmax(logits[:, 0], -1), position + 1

    rows = [jax.ShapeDtypeStruct(*row)] * 2
    return (prefill, model, block(prompt)), (jax.jit(token, donate_argnums=1), model, cache, *rows)


def main(given=None):
    parser = argparse.ArgumentParser(description="Plans new tokens on absent chips.")
    parser.add_argument("recipe")
    parser.add_argument("--on", default="t4,l4,a100,h100", help="chips, each with =DOLLARS an hour if known")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=200, help="new ones")
    parser.add_argument("--texts", default="1,8,64", help="at once on a device")
    asked = parser.parse_args(given)
    recipe, length = cw.load(asked.recipe, asked.set, synthetic=True), asked.prompt + asked.tokens
    if length > (recipe.task.context or 0):
        parser.error(f"{recipe.name} has no decode for {length} positions")
    form = "{:10} {:>5} {:>17} {:>10} {:>10} {:>9} {:>7}"
    print(form.format("chip", "texts", "memory", "first, ms", "token, ms", "tokens/s", "$/M"))
    for texts in map(int, asked.texts.split(",")):
        before, after = programs(recipe, texts, asked.prompt, length)
        for chip, _, dollars in (one.partition("=") for one in asked.on.split(",")):
            try:
                prompt, token = cw.compile.on(chip, *before), cw.compile.on(chip, *after)
            except cw.errors.DeviceError as error:
                print(f"{chip:10} {texts:>5} {error}")
                continue
            first, each = prompt.seconds.value, token.seconds.value
            rate = texts * asked.tokens / (first + asked.tokens * each)
            price = f"{1e6 / rate * float(dollars) / 3600:.3f}" if dollars else "-"
            needed = max(prompt.needed_bytes, token.needed_bytes) / 1e9
            memory = f"{needed:.1f} of {token.available_bytes / 1e9:.1f} GB"
            times = f"{1e3 * (first + each):.2f}", f"{1e3 * each:.3f}"
            print(form.format(chip, texts, memory, *times, f"{rate:,.0f}", price))


if __name__ == "__main__":
    main()
