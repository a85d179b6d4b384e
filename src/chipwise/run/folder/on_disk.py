"""The folder in which Orbax writes a checkpoint, and when it gets its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orbax.checkpoint.path import atomicity

from ...base.files import fsync_folder, put_on_disk


class OnDisk(atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary folder of a checkpoint. It is on disk before it gets its name, and its name
    is before Orbax removes an older one. `before` is called first, in Orbax's thread."""

    before: Callable[[], None]
    store: Any

    @classmethod
    def after(cls, before: Callable[[], None]) -> type[OnDisk]:
        return type(cls.__name__, (cls,), {"before": staticmethod(before)})

    @classmethod
    def from_final(cls, final_path: Any, **options: Any) -> Any:
        # With the store, Orbax adds the time to a file that is on disk already
        store = options.pop("checkpoint_metadata_store", None)
        made: Any = super().from_final(final_path, **options)
        made.store = store
        return made

    async def finalize(self) -> None:
        if self.store is not None:
            self.store.wait_until_finished()  # it writes in a thread, to the temporary name
        self.before()
        put_on_disk(self.get())
        await super().finalize()
        fsync_folder(self.get_final().parent)
