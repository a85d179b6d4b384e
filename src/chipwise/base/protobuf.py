"""Reads messages of protobuf by schemas that the package brings."""

from __future__ import annotations

import functools
from importlib.resources import files as resources
from typing import Any


@functools.cache
def message_class(package: str, schema: str, name: str) -> Any:
    """The class of the message `name`, from `schema`, a file in the package's folder with a
    `FileDescriptorProto` as text."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    text, pool = (
        resources(package).joinpath(schema).read_text("utf-8"),
        descriptor_pool.DescriptorPool(),
    )
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
