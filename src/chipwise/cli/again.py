"""The command that was given, as it has to be typed to go on with what it began."""

from __future__ import annotations

import shlex

import typer


def again(context: typer.Context, **changed: str) -> str:
    """The command line of `context`: what was given there, and the options `changed` in its place."""
    words = ["chipwise", str(context.info_name)]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if name in changed:
            given, value = True, changed[name]
        if not given:
            continue
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                words += [parameter.opts[0], str(one)]
    return shlex.join(words)
