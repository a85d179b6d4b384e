"""GPT-2 small with Muon, in a third of AdamW's steps.

    chipwise train examples/gpt2_muon.py:recipe --data DIR         # packed tokens, as of gpt2-124m
    chipwise plan examples/gpt2_muon.py:recipe --on h100:8,v5p-8   # what it costs, without data

The settings are those of the record of 10 October 2024 in github.com/KellerJordan/modded-nanogpt
(records/101024_Muon): 6,200 steps of 524,288 tokens, AdamW's rate of 0.0036 for the words, Muon's update a
tenth of it, no decay, and a rate that falls in a straight line over the last 1,800 steps. It reached a loss
of 3.28 on FineWeb after 22.3 minutes on 8 H100, 216 ms a step; llm.c's AdamW, the recipe `gpt2-124m`, took
19,560 steps and 45 minutes.

What differs: the record's net has rotary positions, norms without a scale and no biases, and its Muon splits
queries, keys and values; here they are one matrix. Planned by the compiler for 8 H100: 167 ms a step (108 to
262), 17 minutes in all; not trained here to its end.
"""

import dataclasses

import chipwise as cw

STEPS, FALL, RATE = 6_200, 1_800, 0.0036


def trapezoid(step: int) -> float:
    return RATE * min(1.0, (STEPS - step) / FALL)


def recipe(
    data: str | None = None, context: int = 1024, vocabulary: int = 50_257, depth: int = 12, width: int = 768,
    heads: int = 12,
) -> cw.Recipe:  # fmt: skip
    sizes = {"context": context, "vocabulary": vocabulary, "depth": depth, "width": width, "heads": heads}
    made = cw.load("gpt2-124m", [f"{name}={size}" for name, size in sizes.items()], data)
    muon = cw.recipe.muon(lr=trapezoid, rms=0.1, momentum=0.95, b1=0.9, b2=0.95)
    return dataclasses.replace(made, name="gpt2-muon", duration=f"{STEPS}st", optimizer=muon, validated=None)
