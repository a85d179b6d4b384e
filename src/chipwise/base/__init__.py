"""The base of every package: errors with codes, facts and their sentences, figures, files.

A result or an error is a code with numbers. Its sentence is in `messages/`, or in the code beside
it.
"""

from .errors import (  # noqa: F401
    CheckpointError,
    ChipwiseError,
    DataError,
    DeviceError,
    DeviceFault,
    DivergedError,
    HostLost,
    RecipeError,
    RunError,
    Stopped,
    Stuck,
    invalid,
    library,
    near,
    unknown,
    unreadable,
)
from .facts import Fact, Say, fact, plain, say, silent, text_of, texts  # noqa: F401
