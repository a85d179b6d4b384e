"""Says which way a metric is better: as it is declared, as its `Sum` states, or by its name.

    Task(..., better={"bpb": "lower"})         the task declares it
    cw.Sum.of(values, better="lower")          the metric states it
    chipwise ... --lower bpb                   the user says it, which counts first

Maps of directions have names without `train/` and `eval/`, so `"bpb"` is both `"train/bpb"` and
`"eval/bpb"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..base import Fact, RecipeError, fact, invalid, near, unknown

LOWER, HIGHER = DIRECTIONS = ("lower", "higher")

Directions = Mapping[str, str]
"""Names without `train/` and `eval/`, to "lower" or "higher"."""

# A name is known by whole words or phrases. The directions are those that scikit-learn's scorers
# (`greater_is_better`), torchmetrics (`higher_is_better`), the metrics of Keras (`_direction`) and
# papers state. Words that mean both, such as "score" and "distance", are left out.
_KNOWN = {
    LOWER: "lower, loss, losses, error, errors, err, nll, negative log likelihood, "
    "neg log likelihood, logloss, cross entropy, crossentropy, xent, ce, bce, hinge, huber, "
    "pinball, perplexity, ppl, bits per, bpb, bpc, bpd, bpt, kl, divergence, deviance, brier, "
    "ece, crps, mse, rmse, nrmse, msle, rmsle, mae, mape, smape, wmape, mase, medae, epe, mpjpe, "
    "hamming, wer, cer, mer, eer, edit distance, levenshtein, fid, fvd, fad, kid, lpips, mmd, "
    "chamfer, fpr, fnr, false positive, false positives, false negative, false negatives, "
    "regret, latency",
    HIGHER: "higher, accuracy, accuracies, acc, auc, auroc, auprc, map, ap, precision, recall, "
    "sensitivity, specificity, f1, f2, fbeta, dice, jaccard, iou, io u, miou, kappa, mcc, "
    "matthews, exact match, tpr, tnr, true positive, true positives, true negative, "
    "true negatives, r2, explained variance, pearson, spearman, kendall, correlation, "
    "cosine similarity, psnr, ssim, inception score, bleu, sacrebleu, chrf, rouge, rougel, "
    "meteor, cider, bertscore, bert score, comet, ndcg, dcg, mrr, hit, hits, log likelihood, "
    "likelihood, elbo, lower bound, reward, return, returns, success, win, throughput",
}
_WAYS = {phrase: way for way, text in _KNOWN.items() for phrase in text.split(", ")}
_WORD = re.compile("[A-Za-z][0-9](?![a-z0-9])|[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# The longest first: "log likelihood" is no part of "negative log likelihood"
_PHRASE = re.compile(rf"\b(?:{'|'.join(sorted(_WAYS, key=len, reverse=True))})\b")
# As "neg_mse" of scikit-learn, whose direction nobody can tell from the words alone
_TURNED = re.compile(r"\b(?:neg|negative|negated|minus|inverse|reduction|drop)\b")


def bare(metric: str) -> str:
    """The metric's name without `train/` or `eval/`."""
    return re.sub("^(train|eval)/", "", metric)


def named(metric: str) -> str | None:
    """The direction of a name such as `"eval/val_bpb"` or `"MSELoss"`: that of its known words.
    `None` if it has none, words of both directions, or one that turns them, such as "neg"."""
    words = " ".join(_WORD.findall(bare(metric))).lower()
    found = {_WAYS[phrase] for phrase in _PHRASE.findall(words)}
    turned = _TURNED.search(_PHRASE.sub("", words))
    return found.pop() if len(found) == 1 and not turned else None


def direction(metric: str, known: Directions) -> str | None:
    """The direction of a metric that is `known`, else that of its name. `None` if unknown."""
    return known.get(bare(metric)) or named(metric)


def declared(better: Directions) -> dict[str, str]:
    """A user's directions, by names without `train/` and `eval/`. Raises `RecipeError` for anything
    but a dict of `"lower"` and `"higher"`."""
    if not isinstance(better, Mapping) or not all(way in DIRECTIONS for way in better.values()):
        raise invalid("better-expected", "better", better, "{'bpb': 'lower', 'top5': 'higher'}")
    return {bare(name): way for name, way in better.items()}


def directions(sums: Mapping[str, Any], better: Directions) -> dict[str, str]:
    """The direction of each metric in `sums`, if it is known: as it is declared, else as its `Sum`
    states, else that of its name. Raises `RecipeError` for a declared name that is no metric."""
    for name in better.keys() - sums.keys():
        raise unknown("better-of-no-metric", "metric", name, sorted(sums))
    own = declared({name: one.better for name, one in sums.items() if one.better})
    known = {**own, **better}
    return {name: way for name in sums if (way := direction(name, known))}


def judged(metric: str, better: Directions, *runs: Directions, strict: bool = True) -> Fact:
    """Says which way a metric is better: as the user has typed, else as all `runs` or recipes say.
    If they disagree, or do not say it, raises `RecipeError`. Unless `strict`, the fact's `better`
    is then `None`."""
    ways = {direction(metric, run) for run in runs or ({},)}
    other = ways.pop() if len(ways) == 1 else None
    way = declared(better).get(bare(metric), other)
    code = "direction" if other in (None, way) else "direction-as-typed"
    hint = near(bare(metric), {name for run in runs for name in run})
    said = fact(
        code if way else "direction-unknown", metric=metric, better=way, other=other, near=hint
    )
    if strict and not way:
        raise RecipeError(said.code, **said.numbers)
    return said
