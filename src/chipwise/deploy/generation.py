"""Continues prompts with a trained language model, token by token, with a cache of keys and values.

Prompts are computed in blocks. Each block runs on one device by two programs: `decode` of the
prompt, and `decode` of one token more. They are compiled once for each pair of a prompt length and
a total length. A prompt's lengths, the size of a block and the keys of its draws depend only on the
prompt, the platform and the seed. So other prompts and more devices change no token.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import DeviceError, DivergedError, RecipeError, invalid
from ..base.annotations import as_annotated
from ..data.pack.tokenise import Tokenizer, tokenizer_of
from ..machine.arithmetic import check_flags, fixed
from ..machine.compilation_cache import compile_on
from ..machine.compiler import jitted
from ..machine.detect import detect
from ..recipe import precision
from ..recipe.random_keys import as_data, as_keys
from ..recipe.recipe import Recipe
from ..run.event import Event
from ..run.folder.result import Result
from ..run.on import ALL, On
from .huggingface import ends_of
from .model import Trained, trained

_ROWS = {"cpu": 1}
"""Prompts of a block, by platform. It is 8 where none is given: an accelerator reads all weights
for a token of one prompt as it does for those of eight. A CPU takes twice as long for the weights
and eight times as long for the attention."""
_SHORTEST = 64  # positions: the first length, each further one is twice as long


@dataclass(frozen=True)
class Generated:
    """What a model wrote after each prompt."""

    prompts: list[tuple[int, ...]]
    """The tokens of each prompt."""
    tokens: list[tuple[int, ...]]
    """The new tokens, without the one that ended the text."""
    texts: list[str]
    """The new tokens as text, up to a text that ended it. Numbers if no tokenizer is known."""
    ends: list[str]
    """Either "stop", or "length" for the largest number of tokens or the context."""
    seconds: float
    """Without compiling."""
    first_seconds: float
    """Until the first token."""


@as_annotated
@fixed()
def generate(
    model: Result | Trained | Event | str | Path,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
    stop: str | Sequence[int | str] = (),
    tokenizer: str | Path | None = None,
    recipe: Recipe | str | None = None,
    on: On = ALL,
    batch: int | None = None,
    show: Callable[[int, str], None] = lambda number, piece: None,
) -> Generated:
    """Continues each of `prompts`, which are texts or token numbers.

        cw.deploy.generate("runs/text", ["Once", "He said"], tokens=50, temperature=0).texts

    A token depends on the model, its prompt, its number among the prompts and the seed. It does not
    depend on the other prompts or the number of devices.

    *Arguments:*

    - `model`, `recipe`: as in `cw.predict`. The task needs `decode`.
    - `tokens`: the largest number of new tokens. A text also ends with the model's context.
    - `temperature`: 0, or below 1e-30, for the most probable token.
    - `top_k`: draw among the `top_k` most probable tokens, or among all if None.
    - `seed`: below 2^32.
    - `stop`: token numbers and texts that end a text, besides the tokenizer's end of a document and
      those with which the model's Hugging Face folder ends one.
    - `tokenizer`: a `tokenizer.json`. By default that of the pack that trained the model, or bytes.
    - `batch`: the number of prompts that are computed together, by default 8, or 1 on a CPU.
      Another number rounds differently.
    - `show`: called with a prompt's number and each new piece of text.

    Raises `RecipeError`, `RunError` and `DeviceError`. Raises `DataError` for a tokenizer of
    another vocabulary, and `DivergedError` for logits that are not finite.
    """
    for name, value, right in (
        ("tokens", tokens, tokens >= 1),
        ("temperature", temperature, 0 <= temperature < 1e9),
        ("top_k", top_k, top_k is None or top_k >= 1),
        ("batch", batch, batch is None or batch >= 1),
        ("seed", seed, 0 <= seed < 1 << 32),
    ):
        if not right:
            raise invalid("generate-argument", name, value, "a larger one, or the default")
    if jax.process_count() > 1:
        raise DeviceError("predict-one-host", processes=jax.process_count())
    if temperature < 1e-30:  # divided by it, logits of float32 are infinite
        temperature = 0.0
    prompts = [prompts] if isinstance(prompts, str) else prompts
    stop = [stop] if isinstance(stop, str) else stop
    known = trained(model, recipe)
    decoder = Decoder(known, on, batch, (temperature, seed), top_k)
    train, texts = known.recipe.task.train, known.recipe.task.known_texts
    cut = tokenizer_of(train, texts, tokenizer, decoder.vocabulary) or _NUMBERS
    stops = [*stop, *ends_of(texts, cut)]
    begun = []
    for number, prompt in enumerate(prompts):
        given = _tokens(prompt, cut, decoder)
        most = min(tokens, decoder.context - len(given) + 1)
        begun.append(Completion(number, given, most, cut.decode, stops, show))
    seconds = decoder.run(begun)
    new = [tuple(one.new) for one in begun], [one.text for one in begun], [one.end for one in begun]
    return Generated([one.given for one in begun], *new, *seconds)


class Completion:
    """The text that follows a prompt.

    *Fields:* `number` of the prompt. `given`: its tokens. `most`: the largest number of new tokens.
    `new`: the new tokens so far. `text`: the new tokens as text. `end`: "stop" or "length", or ""
    while the text has not ended.
    """

    def __init__(
        self,
        number: int,
        given: tuple[int, ...],
        most: int,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[int | str],
        show: Callable[[int, str], None],
    ):
        self.number, self.given, self.most = number, given, most
        self.text = self.end = ""
        self.new: list[int] = []
        self._decode, self._stop, self._show = decode, stop, show
        self._ends = [one for one in stop if isinstance(one, str) and one]
        self._before, self._shown = len(decode(given)), 0

    def take(self, token: int) -> None:
        """Adds a token and shows its text. Ignores tokens after the end. Raises `DivergedError` if
        the token is negative."""
        if self.end:
            return
        if token < 0:
            text = (
                "The logits after {tokens:,} tokens are not finite: the weights are damaged or "
                "diverged."
            )
            raise DivergedError("logits-not-finite", text, tokens=len(self.given) + len(self.new))
        if token in self._stop:
            self.end = "stop"
        else:
            self.new.append(token)
            self.end = "length" if len(self.new) == self.most else ""
        # With the prompt: a tokenizer may write a token otherwise at the beginning of a text
        self.text = self._decode([*self.given, *self.new])[self._before :]
        if found := [at for one in self._ends if (at := self.text.find(one)) >= 0]:
            self.text, self.end = self.text[: min(found)], "stop"
        until = len(self.text)
        # The last letter may lack tokens, and the last ones begin a text that ends it
        if not self.end:
            until = len(self.text.rstrip("\ufffd")) - max(
                (len(one) - 1 for one in self._ends), default=0
            )
        if until > self._shown:
            self._show(self.number, self.text[self._shown : until])
            self._shown = until


class Decoder:
    """A trained model on each device.

    *Fields:* `context`, `vocabulary`, and `rows`, the prompts of a block.

    *Arguments:* `how`: temperature and seed of draws. Raises `RecipeError` for a task without
    `decode`, or whose `decode` returns logits of another shape. Raises `DeviceError`.
    """

    def __init__(
        self, known: Trained, on: On, rows: int | None, how: tuple[float, int], top_k: int | None
    ):
        task, self._recipe = known.recipe.task, known.recipe
        if task.decode is None or task.context is None:
            text = "The task of {recipe} has no decode: give cw.Task(decode=f, context=N)."
            raise RecipeError("task-without-decode", text, recipe=known.recipe.name)
        self.context = task.context
        machine = detect(on.devices, on.platform)
        if on.exact:
            check_flags(machine.platform)
        self._how, self._top_k = (np.float32(how[0]), np.uint32(how[1])), top_k
        self.rows = rows or _ROWS.get(machine.platform, 8)
        self._jit = functools.partial(jitted, device=machine.devices[0], exact=on.exact)
        model = as_data((precision.cast(known.params, known.recipe.precision), known.state))
        self._models = [jax.device_put(model, device) for device in machine.devices]
        logits = written_shapes(self._recipe, self._models[0], self.rows, 1)[0]
        if getattr(logits, "ndim", 0) != 3 or logits.shape[:2] != (self.rows, 1):
            text = (
                "Task.decode returned logits of {got}: expected (batch, t, vocabulary), ({rows}, "
                "1, ...)."
            )
            raise RecipeError("decode-returns", text, got=str(logits), rows=self.rows)
        self.vocabulary: int = logits.shape[2]

    def run(self, texts: Sequence[Completion]) -> tuple[float, float]:
        """Writes all texts. *Returns* the seconds without compiling, and the seconds until the
        first token."""
        blocks, key = [], lambda text: lengths(self.context, len(text.given), text.most)
        for both, same in itertools.groupby(sorted(texts, key=key), key):
            programs, held = self._programs(*both), list(same)
            cuts = range(0, len(held), self.rows)
            blocks += [(both[0], held[i : i + self.rows], programs) for i in cuts]
        waiting = iter(blocks)

        def written(device: int) -> Iterator[bool]:
            for block in waiting:  # a device that is done takes the next
                yield from self._decode_block(*block, device)

        began, first = time.perf_counter(), 0.0
        running = [written(device) for device in range(len(self._models))]
        while running:
            running = [one for one in running if next(one, False)]
            first = first or any(one.new or one.end for one in texts) * (
                time.perf_counter() - began
            )
        return time.perf_counter() - began, first

    def _programs(self, prompt: int, whole: int) -> list[list[Any]]:
        """The two programs, compiled for every device."""
        models, about = self._models, (self.rows, prompt, whole, self._how, self._top_k)
        programs = decode_programs(self._recipe, models[0], *about)
        made = [self._jit(f, donate_argnums=n) for f, _, n in programs]
        return compile_on(
            len(models), 2, lambda i, g: made[i].lower(models[g], *programs[i][1][1:])
        )

    def _decode_block(
        self, prompt: int, texts: Sequence[Completion], programs: list[list[Any]], device: int
    ) -> Iterator[bool]:
        """Writes the texts of a block. Yields after it has started a token, before it waits for
        it."""
        (prefill, step), model = (each[device] for each in programs), self._models[device]
        tokens, last = np.zeros((self.rows, prompt), np.int32), np.zeros((3, self.rows), np.int32)
        for row, one in enumerate(texts):
            tokens[row, : len(one.given)] = one.given
            last[:, row] = one.given[-1], len(one.given) - 1, one.number
        cache, (token, positions, numbers) = prefill(model, tokens), last
        most = max(one.most for one in texts)
        for turn in range(1 + most):
            before = token
            # The prompt's last token is computed again: so one program draws every token
            if turn < most:
                cache, token, positions = step(model, cache, token, positions, numbers, self._how)
            if turn:
                for one, number in zip(texts, np.asarray(before).tolist(), strict=False):
                    one.take(number)
            if all(one.end for one in texts):
                return
            yield True


def lengths(context: int, prompt: int, tokens: int) -> tuple[int, int]:
    """The lengths, in positions, of the programs for a prompt of `prompt` tokens and `tokens` new
    ones: of the prompt alone, and of the whole text."""
    both = prompt, prompt + tokens - 1
    first, last = (_SHORTEST << ((length - 1) // _SHORTEST).bit_length() for length in both)
    return min(context, first), min(context, last)


def written_shapes(recipe: Recipe, model: Any, rows: int, length: int) -> Any:
    """The shapes of the logits and the cache for `rows` texts of `length` positions.

    *Arguments:* `model`: the parameters in the precision of the computation, and the state.
    """
    tokens, position = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
    return jax.eval_shape(partial(_logits, recipe, cache=None), model, tokens, position)


def decode_programs(
    recipe: Recipe,
    model: Any,
    rows: int,
    prompt: int,
    whole: int,
    how: tuple[Any, Any],
    top_k: int | None,
) -> list[tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]:
    """Both programs of a block, each with its arguments and the numbers of the arguments that it
    may overwrite. The first computes prompts of `prompt` positions, the second computes one token
    more. The cache has `whole` positions.

    *Arguments:* `model`, `rows`: as in `written_shapes`. `how`: temperature and seed.
    """
    shapes, row = written_shapes(recipe, model, rows, whole)[1], np.zeros(rows, np.int32)

    def prefill(model: Any, tokens: Any) -> Any:
        cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return _logits(recipe, model, tokens, jnp.zeros(rows, jnp.int32), cache)[1]

    def step(model: Any, cache: Any, tokens: Any, positions: Any, numbers: Any, drawn: Any) -> Any:
        logits, cache = _logits(recipe, model, tokens[:, None], positions, cache)
        logits, drawn = logits[:, 0].astype(jnp.float32), drawn if how[0] else None
        return cache, _drawn(logits, numbers, positions + 1, drawn, top_k), positions + 1

    return [
        (prefill, (model, row[:, None].repeat(prompt, 1)), ()),
        (step, (model, shapes, row, row, row, how), (1,)),
    ]


def _logits(recipe: Recipe, model: Any, tokens: Any, position: Any, cache: Any) -> Any:
    assert recipe.task.decode is not None
    with precision.products(recipe.precision):
        params, state = as_keys(model)
        return recipe.task.decode(params, state, tokens, cache, position)


def _drawn(
    logits: jax.Array, numbers: Any, positions: Any, how: Any, top_k: int | None
) -> jax.Array:
    """Draws a token for each row of `logits` `(n, vocabulary)`. The key comes from the prompt's
    number and the position. The token is -1 if the logits are not finite.

    *Arguments:* `how`: temperature and seed, or None for the most probable token.
    """
    token = jnp.argmax(logits, axis=-1)
    if how is not None:
        scaled = logits / how[0]
        if top_k is not None and top_k < logits.shape[-1]:
            scaled = jnp.where(scaled < jax.lax.top_k(scaled, top_k)[0][:, -1:], -jnp.inf, scaled)
        key, fold = jax.random.key(how[1], impl="threefry2x32"), jax.random.fold_in
        draw = jax.vmap(lambda n, at, row: jax.random.categorical(fold(fold(key, n), at), row))
        token = draw(numbers, positions, scaled)
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), token.astype(jnp.int32), -1)


def _numbers(text: bytes) -> list[int]:
    if wrong := [word for word in text.decode().split() if not word.isdecimal() or len(word) > 9]:
        sentence = (
            "'{word:plain}': no tokenizer is known. Give --tokenizer FILE, or numbers: '12 7'."
        )
        raise RecipeError("prompt-without-tokenizer", sentence, word=wrong[0])
    return [int(word) for word in text.split()]


_NUMBERS = Tokenizer(_numbers, lambda tokens: "".join(f" {token}" for token in tokens), 0, None)
"""For a model whose tokenizer is not known."""


def _tokens(prompt: Any, cut: Tokenizer, decoder: Decoder) -> tuple[int, ...]:
    """The tokens of a prompt. A text is the beginning of a document. An empty one, if the tokenizer
    puts nothing before a document, becomes the token that ends one. Raises `RecipeError` if there
    are no tokens, tokens that the model does not have, or too many."""
    if isinstance(prompt, str):
        empty = () if cut.end is None else (cut.end,)
        prompt = cut.begun(prompt.encode("utf-8", "replace")) or empty
    tokens = tuple(int(token) for token in prompt)
    if not tokens or min(tokens) < 0 or max(tokens) >= decoder.vocabulary:
        expected = f"token numbers below {decoder.vocabulary}, at least one"
        raise invalid("prompt-tokens", "a prompt", tokens[:8], expected)
    if len(tokens) > decoder.context:
        text = (
            "The prompt has {tokens:,} tokens, the model's context {context:,}: give its end alone."
        )
        raise RecipeError("prompt-above-context", text, tokens=len(tokens), context=decoder.context)
    return tokens
