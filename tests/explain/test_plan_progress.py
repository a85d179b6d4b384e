"""What is seen while a plan is made."""

from rich.progress import Progress

from chipwise.explain import plan_progress


def test_a_terminal_shows_something_before_anything_is_compiled(monkeypatch):
    bars = []

    def bar(*columns, **settings):
        bars.append(Progress(disable=True))
        return bars[0]

    monkeypatch.setattr(plan_progress, "Progress", bar)
    with plan_progress.plan_progress() as progress:
        (task,) = bars[0].tasks
        assert task.visible and task.description == "tracing"
        progress(1, 3)
        assert task.description == "compiling" and (task.completed, task.total) == (1, 3)
