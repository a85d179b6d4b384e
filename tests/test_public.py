"""The public names, so that none comes or goes unnoticed."""

import chipwise as cw

NAMES = """
Arrays BatchSearch CheckpointError ChipwiseError DataError DeviceError DivergedError Finding ImageFolder
Lazy LrSearch PackedFolder Plan Recipe RecipeError Result RunError Stepper Stopped Study Sum Task Transfer
Validated adam adamw augment check constant cosine datasets detect evaluate exponential find_batch find_lr
fit from_optax functional linear load losses metrics one_cycle one_cycle_momentum pack piecewise plan read
restore_run sgd simulate sweep transfer warmup
""".split()  # noqa: SIM905


def test_public_names():
    import types

    found = {
        name
        for name, value in vars(cw).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert found | {"augment", "datasets", "losses", "metrics", "read"} == set(NAMES)


def test_every_public_name_is_documented():
    for name in NAMES:
        assert getattr(cw, name).__doc__, name


def test_exit_codes_are_distinct_where_the_fix_differs():
    codes = [
        e.exit_code
        for e in (cw.RecipeError, cw.DataError, cw.DeviceError, cw.RunError, cw.DivergedError, cw.Stopped)
    ]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes and 1 not in codes
