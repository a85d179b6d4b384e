"""Hosts train together only if they have the same recipe, data and kind of chip."""

from __future__ import annotations

from collections.abc import Callable

from ..base import DeviceError
from ..data.compared import Data, changed_data, texts
from ..machine.hosts import Hosts
from ..recipe.recipe import Recipe


def check_alike(hosts: Hosts, recipe: Recipe, chip: str, data: Callable[[], Data]) -> None:
    """Raises `DeviceError`, which names the host, if hosts have different recipes, data or chips.

    *Arguments:* `data`: reads some of the data, and returns how far it is compared.
    """
    if hosts.count == 1:
        return
    settings = {"host-differs-recipe": recipe.describe(), "host-differs": {"chip": chip}}
    hosts.compare("recipe", settings)
    first, *others = hosts.everyone("data", texts(data()))
    for host, own in enumerate(others, 1):
        for name, what in changed_data(first, own):
            which = {"host": host, "host_name": hosts.names[host], "name": name}
            raise DeviceError("host-differs-data", **which, what=what)
