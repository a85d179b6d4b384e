"""A trained language model goes on with prompts, token by token, with a cache of keys and values.

    chipwise train gpt2-124m --data tokens --run runs/text ...
    python examples/generate.py runs/text --prompt "One morning" --prompt "He" --tokens 100 --temperature 0.8

For tasks with `decode`: of `gpt2-124m` and `llama-8b` of any size, and your own (docs/models.md). Text
is cut by `--tokenizer FILE`, the `tokenizer.json` that packed it; without one a vocabulary of 257 is bytes,
and other prompts are token numbers, "12 7 3".

Prompts are computed in blocks, each by two programs, compiled once for a bucket of lengths: `decode` of the
prompt, and `decode` of one token. A prompt's bucket, the size of a block and the keys of its draws depend on
the prompt, the platform and the seed alone, so other prompts and more devices change no token.
"""

import argparse
import itertools
import sys
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import chipwise as cw
from chipwise.deploy.model import trained
from chipwise.engine.step import compiler_options
from chipwise.errors import DataError, DivergedError, RecipeError, invalid, library
from chipwise.machine.arithmetic import check_flags, fixed
from chipwise.machine.compilation_cache import compile_on
from chipwise.machine.detect import detect
from chipwise.recipe import precision

ROWS = {"cpu": 1}
"""Prompts of a block, else 8: an accelerator reads all weights for a token of one as for those of eight; a
CPU takes twice as long for the weights and eight times for the attention."""
SHORTEST = 64  # positions: the first bucket, each further one is twice as long
BYTES = 257  # kinds of tokens, if each is a byte: 256 ends a document


class Generated(NamedTuple):
    """Of each prompt its tokens, the new ones without the one that ended it, and these as text; the seconds
    without compiling, and those until the first token."""

    prompts: list
    tokens: list
    texts: list
    seconds: float
    first_seconds: float


@fixed()
def generate(
    model, prompts, *, tokens=200, temperature=0.8, top_k=40, seed=0, stop=None, tokenizer=None, recipe=None,
    on=None, batch=None, show=lambda number, piece: None,
):  # fmt: skip
    """Goes on with each of `prompts`, texts or token numbers.

    `model`, `recipe`: as in `cw.predict`; `tokens`: new ones, at most; `temperature`: 0 for the most probable
    token; `top_k`: the draw is among so many, None: all; `stop`: tokens that end a text; `batch`: prompts
    that are computed together, another number rounds otherwise; `show`: called with a prompt's number and
    each new piece of text.
    """
    for name, value, right in (
        ("tokens", tokens, tokens >= 1), ("temperature", temperature, 0 <= temperature < 1e9),
        ("top_k", top_k, top_k is None or top_k >= 1), ("batch", batch, batch is None or batch >= 1),
        ("seed", seed, 0 <= seed < 1 << 32),
    ):  # fmt: skip
        if not right:
            raise invalid("generate-argument", name, value, "a larger one, or the default")
    speaker = Speaker(trained(model, recipe), on or cw.On(), batch)
    cut = letters(tokenizer, speaker.vocabulary)
    ends = stop if stop is not None else [] if cut is None or cut.end is None else [cut.end]
    texts = []
    for number, prompt in enumerate(prompts):
        numbers = speaker.checked(numbers_of(prompt, cut))
        most = min(tokens, speaker.context - len(numbers) + 1)  # the context ends a text
        texts.append(Text(number, numbers, most, frozenset(ends), cut, show))
    seconds, first = speaker.run(texts, partial(drawn, temperature, top_k, seed))
    given, new = [one.given for one in texts], [tuple(one.new) for one in texts]
    return Generated(given, new, [one.text() for one in texts], seconds, first)


class Text:
    """A prompt, and the `new` tokens so far, of which so many letters were `shown`."""

    def __init__(self, number, given, most, ends, cut, show):
        self.number, self.given, self.most = number, given, most
        self.ends, self.cut, self.show = ends, cut, show
        self.new = []
        self.done, self.shown = False, 0

    def text(self):
        """The new tokens as text. A tokenizer may write a token otherwise at the beginning of a text."""
        if self.cut is None:
            return "".join(f" {token}" for token in self.new)
        return self.cut.decode([*self.given, *self.new])[len(self.cut.decode(self.given)) :]

    def take(self, token):
        if self.done:
            return
        if token < 0:
            text = "The logits after {tokens:,} tokens are not finite: the weights are damaged or diverged."
            raise DivergedError("logits-not-finite", text, tokens=len(self.given) + len(self.new))
        if token not in self.ends:
            self.new.append(token)
        self.done = token in self.ends or len(self.new) == self.most
        piece = self.text()[self.shown :]
        if piece and (self.done or not piece.endswith("\ufffd")):  # a token may be a part of a letter
            self.shown += len(piece)
            self.show(self.number, piece)


def drawn(temperature, top_k, seed, logits, numbers, positions):
    """A token of each row of `logits` `(n, vocabulary)`, keyed by its prompt's number and its position; -1 if
    they are not finite."""
    token = jnp.argmax(logits, axis=-1)
    if temperature:
        scaled = logits / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            scaled = jnp.where(scaled < jax.lax.top_k(scaled, top_k)[0][:, -1:], -jnp.inf, scaled)
        key, fold = jax.random.key(seed, impl="threefry2x32"), jax.random.fold_in
        draw = jax.vmap(lambda n, at, row: jax.random.categorical(fold(fold(key, n), at), row))
        token = draw(numbers, positions, scaled)
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), token.astype(jnp.int32), -1)


class Speaker:
    """A model on each device. *Fields:* `context`, `vocabulary`; `rows` of a block."""

    def __init__(self, known, on, batch):
        task, self.precision = known.recipe.task, known.recipe.precision
        if task.decode is None or task.context is None:
            text = "The task of {recipe} has no decode: give cw.Task(decode=f, context=N)."
            raise RecipeError("task-without-decode", text, recipe=known.recipe.name)
        machine = detect(on.devices, on.platform)
        if on.exact:
            check_flags(machine.platform)
        self.decode, self.context = task.decode, task.context
        self.rows = batch or ROWS.get(machine.platform, 8)
        self.options = compiler_options(machine.platform, on.exact, machine.kind)
        model = precision.cast(known.params, self.precision), known.state
        self.models = [jax.device_put(model, device) for device in machine.devices]
        logits = self._shapes(1)[0]
        if getattr(logits, "ndim", 0) != 3 or logits.shape[:2] != (self.rows, 1):
            text = "Task.decode returned logits of {got}: expected (batch, t, vocabulary), ({rows}, 1, ...)."
            raise RecipeError("decode-returns", text, got=str(logits), rows=self.rows)
        self.vocabulary = logits.shape[2]

    def _decode(self, model, tokens, position, cache):
        params, state = model
        with precision.products(self.precision):
            return self.decode(params, state, tokens, cache, position)

    def _shapes(self, length):
        tokens, position = np.zeros((self.rows, length), np.int32), np.zeros(self.rows, np.int32)
        return jax.eval_shape(partial(self._decode, cache=None), self.models[0], tokens, position)

    def checked(self, prompt):
        """The prompt. Raises `RecipeError` if it has no tokens, others than the model's, or too many."""
        if not prompt or min(prompt) < 0 or max(prompt) >= self.vocabulary:
            expected = f"token numbers below {self.vocabulary}, at least one"
            raise invalid("prompt-tokens", "a prompt", prompt[:8], expected)
        if len(prompt) > self.context:
            text = "The prompt has {tokens:,} tokens, the model's context {context:,}: give its end alone."
            raise RecipeError("prompt-above-context", text, tokens=len(prompt), context=self.context)
        return prompt

    def run(self, texts, draw):
        """Writes all texts. *Returns* the seconds, and those until the first token."""
        blocks = []
        for lengths, same in itertools.groupby(sorted(texts, key=self._lengths), self._lengths):
            programs, held = self._programs(*lengths, draw), list(same)
            cuts = range(0, len(held), self.rows)
            blocks += [(lengths[0], held[i : i + self.rows], programs) for i in cuts]
        began, first, count = time.perf_counter(), 0.0, len(self.models)
        for i in range(0, len(blocks), count):  # a block on each device
            running = [self._going_on(*block, device) for device, block in enumerate(blocks[i : i + count])]
            while running:
                running = [one for one in running if next(one, None) is not None]
                first = first or any(one.new or one.done for one in texts) * (time.perf_counter() - began)
        return time.perf_counter() - began, first

    def _lengths(self, text):
        """The positions of its prompt and of all, as there are programs for."""
        both = len(text.given), len(text.given) + text.most - 1
        first, last = (SHORTEST << ((length - 1) // SHORTEST).bit_length() for length in both)
        return min(self.context, first), min(self.context, last)

    def _programs(self, prompt, whole, draw):
        """Both, for every device: for prompts of `prompt` positions, with a cache of `whole`."""
        shapes, row = self._shapes(whole)[1], np.zeros(self.rows, np.int32)

        def prefill(model, tokens):
            cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return self._decode(model, tokens, jnp.zeros(self.rows, jnp.int32), cache)[1]

        def step(model, cache, tokens, positions, numbers):
            logits, cache = self._decode(model, tokens[:, None], positions, cache)
            return cache, draw(logits[:, 0].astype(jnp.float32), numbers, positions + 1), positions + 1

        both = (
            (jax.jit(prefill, compiler_options=self.options), [np.zeros((self.rows, prompt), np.int32)]),
            (jax.jit(step, donate_argnums=1, compiler_options=self.options), [shapes, row, row, row]),
        )
        return compile_on(len(self.models), 2, lambda i, g: both[i][0].lower(self.models[g], *both[i][1]))

    def _going_on(self, prompt, texts, programs, device):
        """Writes the texts of a block; yields when a token was begun, before it is waited for."""
        (prefill, step), model = (each[device] for each in programs), self.models[device]
        tokens, last = np.zeros((self.rows, prompt), np.int32), np.zeros((3, self.rows), np.int32)
        for row, one in enumerate(texts):
            tokens[row, : len(one.given)] = one.given
            last[:, row] = one.given[-1], len(one.given) - 1, one.number
        cache, (drawn, positions, numbers), most = prefill(model, tokens), last, max(t.most for t in texts)
        for turn in range(1 + most):
            before = drawn
            if turn < most:
                cache, drawn, positions = step(model, cache, drawn, positions, numbers)
            if turn:
                for one, token in zip(texts, np.asarray(before).tolist(), strict=False):
                    one.take(token)
            if all(one.done for one in texts):
                return
            yield True


class Letters(NamedTuple):
    encode: object
    decode: object
    end: int | None


def letters(tokenizer, vocabulary):
    """How text is cut into tokens, or None. Raises `DataError` for a tokenizer of another vocabulary."""
    if tokenizer is None and vocabulary != BYTES:
        return None
    if tokenizer is None:
        spelled = lambda tokens: bytes(t for t in tokens if t < 256).decode("utf-8", "replace")  # noqa: E731
        return Letters(lambda text: list(text.encode("utf-8", "replace")), spelled, 256)
    read = library("tokenizers", "pack-library").Tokenizer.from_file(str(tokenizer))
    if (kinds := read.get_vocab_size()) > vocabulary:
        wrong = "{path} has {kinds:,} kinds of tokens, and the model {expected:,}: give the one of its pack."
        raise DataError("tokenizer-vocabulary", wrong, path=str(tokenizer), kinds=kinds, expected=vocabulary)
    ends = map(read.token_to_id, ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"))
    decode = partial(read.decode, skip_special_tokens=False)
    encode = partial(read.encode, add_special_tokens=False)
    return Letters(lambda text: encode(text).ids, decode, next((t for t in ends if t is not None), None))


def numbers_of(prompt, cut):
    """The tokens of a prompt; those of an empty text are the end of a document before."""
    if isinstance(prompt, str) and cut is not None:
        return tuple(cut.encode(prompt)) or (() if cut.end is None else (cut.end,))
    words = prompt.split() if isinstance(prompt, str) else [str(int(number)) for number in prompt]
    if not all(word.lstrip("-").isdecimal() for word in words):
        text = "'{prompt:plain}': no tokenizer is known. Give --tokenizer FILE, or numbers such as '12 7'."
        raise RecipeError("prompt-without-tokenizer", text, prompt=str(prompt)[:40])
    return tuple(map(int, words))


def main(arguments=None):
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("run")
    read.add_argument("--prompt", action="append", required=True, help="may be repeated")
    for name, kind in (
        ("tokens", int),
        ("temperature", float),
        ("top-k", int),
        ("seed", int),
        ("batch", int),
    ):
        read.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    read.add_argument("--tokenizer", default=None, help="a tokenizer.json")
    read.add_argument("--recipe", default=None, help="FILE.py:NAME, if it is not built in")
    given = vars(read.parse_args(arguments))
    run, prompts = given.pop("run"), given.pop("prompt")

    def visible(text):  # a model may write anything
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)

    begun = iter(prompts)
    show = lambda _, piece: print(visible(next(begun, "") + piece), end="", flush=True)  # noqa: E731
    try:
        found = generate(run, prompts, **given, **({"show": show} if len(prompts) == 1 else {}))
    except cw.errors.ChipwiseError as error:
        sys.exit(f"error: {error}")
    whole = [visible(begin + text) for begin, text in zip(prompts, found.texts, strict=True)]
    print(visible(next(begun, "")) if len(prompts) == 1 else "\n\n".join(whole))
    count = sum(map(len, found.tokens))
    rate = count / max(found.seconds, 1e-9)
    print(
        f"{count} tokens, {rate:.1f} a second, the first after {found.first_seconds:.2f} s", file=sys.stderr
    )


if __name__ == "__main__":
    main()
