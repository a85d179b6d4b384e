"""Studies made by hand, for tests of what is read from them and of what is told about them."""

from chipwise.study.study_file import Point, Run, Study


def study(*points, metric="eval/accuracy", folder="runs/s"):
    """Each point: name and a value a seed; `None` for a run that diverged."""
    made = []
    for name, values in points:
        runs = {
            seed: Run(
                seed, f"{name}/seed-{seed}", True, metrics={metric: v}, examples_per_second=100.0 + seed
            )
            if v is not None
            else Run(
                seed,
                f"{name}/seed-{seed}",
                diverged={"code": "loss-not-finite", "first": 3, "last": 4, "value": "nan"},
            )
            for seed, v in enumerate(values)
        }
        made.append(Point({"lr": name}, runs))
    return Study(folder, "r", None, made)
