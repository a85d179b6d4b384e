"""Which way a metric is better: declared, stated by its sum, or known by whole words of its name."""

import jax.numpy as jnp
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import RecipeError
from chipwise.recipe.direction import declared, direction, directions, judged, named
from chipwise.run.folder.run_reader import disagreement
from refusals import refused

LOWER = """
eval/loss train/loss val/MAE rmse eval/hamming perplexity bpb val_bpb bits_per_byte nll
nll_per_token wer cer fid brier ece cross_entropy cross-entropy crossEntropy bce mape hinge
squared_hinge latency latency_p99 top5_error error_rate MSELoss logloss crps eer ppl kl_div
negative_log_likelihood mean_squared_error distance_lower test.loss l2_error
""".split()  # noqa: SIM905
HIGHER = """
eval/accuracy train/acc flower_accuracy f1 eval/f1_macro F1Score f1_terrorism maestro_accuracy
roc_auc AUROC mAP50 mIoU mean_io_u precision recall@5 R2 r2_score psnr ssim bleu4 BLEU-4 rougeL mrr
ndcg@10 hits@10 log_likelihood elbo evidence_lower_bound exact_match cosine_similarity win_rate
reward
""".split()  # noqa: SIM905
UNKNOWN = """
lossless_ratio distance score top5 top_k entropy similarity accuracy_error f1_loss loss_higher
cereal maestro flossing errorless temperature neg_mean_squared_error neg_log_loss negative_elbo
neg_accuracy inverse_perplexity minus_loss loss_reduction
""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    ("metric", "way"),
    [
        *((name, "lower") for name in LOWER),
        *((name, "higher") for name in HIGHER),
        *((name, None) for name in UNKNOWN),
    ],
)
def test_whole_words_of_a_name_say_it_and_parts_of_words_nothing(metric, way):
    assert named(metric) == way


def test_the_task_counts_before_the_sum_and_the_sum_before_the_name():
    one, stated = cw.Sum.of(jnp.ones(2)), cw.Sum.of(jnp.ones(2), better="higher")
    sums = {"loss": stated, "mystery": stated, "bpb": one, "unsaid": one}
    assert directions(sums, {}) == {"loss": "higher", "mystery": "higher", "bpb": "lower"}
    found = directions(sums, {"loss": "lower", "unsaid": "lower"})
    assert (found["loss"], found["unsaid"]) == ("lower", "lower")
    assert direction("eval/unsaid", found) == direction("train/unsaid", found) == "lower"
    with refused(RecipeError, "better-of-no-metric", name="bqb", near="bpb"):
        directions(sums, {"bqb": "lower"})
    with refused(RecipeError, "better-expected"):
        directions({"mystery": cw.Sum.of(jnp.ones(2), better="up")}, {})


def test_the_user_counts_first_and_runs_that_disagree_say_nothing():
    said = judged("eval/bpb", {"eval/bpb": "higher"}, {"bpb": "lower"})
    assert (said.code, said["better"], said["other"]) == ("direction-as-typed", "higher", "lower")
    assert judged("eval/odd", {}, {"odd": "lower"}, {"odd": "lower"})["better"] == "lower"
    runs = {"odd": "lower"}, {"odd": "higher"}
    assert judged("eval/odd", {"odd": "lower"}, *runs).code == "direction"
    assert judged("eval/odd", {}, *runs, strict=False)["better"] is None
    for known in (runs, ()):
        with refused(RecipeError, "direction-unknown", metric="eval/odd") as error:
            judged("eval/odd", {}, *known)
        assert "--lower eval/odd" in str(error.value) and "Task(better={'eval/odd'" in str(error.value)


@pytest.mark.parametrize("given", [["bpb"], {"bpb": "down"}, {"bpb": True}, "lower"])
def test_only_lower_and_higher_can_be_declared(given):
    with refused(RecipeError, "better-expected"):
        declared(given)
    code = "better-expected" if given == {"bpb": "down"} else "wrong-kind"
    with refused(RecipeError, code, what="better"):
        tasks.quick_task(better=given)


def test_every_metric_here_states_its_direction():
    logits, label = jnp.asarray([[2.0, 1.0], [0.0, 1.0]]), jnp.asarray([0, 1])
    several, m = jnp.asarray([[1.0, 0.0], [0.0, 1.0]]), cw.metrics
    higher = [
        *(
            f(logits, label)
            for f in (m.accuracy, m.precision, m.recall, m.f1, m.roc_auc, m.average_precision)
        ),
        m.exact_match(logits, several),
        m.r2(logits, several),
    ]
    lower = [f(logits, several) for f in (m.hamming, m.mse, m.mae, m.rmse)]
    lower += [m.perplexity(cw.Sum.of(jnp.ones(2)))]
    assert {one.better for one in higher} == {"higher"} and {one.better for one in lower} == {"lower"}
    assert m.confusion(logits, label).better is None


def test_a_recipe_that_declares_nothing_is_described_as_before():
    plain, told = (tasks.quick(task=tasks.quick_task(**more)) for more in ({}, {"better": {"loss": "lower"}}))
    assert "better" not in plain.describe()["task"]
    other = tasks.quick(task=tasks.quick_task(better={"eval/loss": "higher"}))
    assert not disagreement(plain.describe(), told.describe())  # a run of before goes on
    assert disagreement(told.describe(), other.describe()) == [("task.better.loss", "lower", "higher")]
    assert disagreement(told.describe(), plain.describe())


def test_a_declared_metric_of_evaluations_alone_needs_no_evaluation():
    task = tasks.quick_task(better={"auc": "higher", "loss": "lower"}, eval=None)
    assert task.directions_of({"loss": None}) == {"loss": "lower"}
