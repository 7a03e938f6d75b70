"""Files that are synced after they are used: where that is safe, and the thread that does it.

A file that was written and not synced is whole for every process of this machine until the machine stops. So what can
be computed again, and is known by its boot (`Receipt.boot`), need not wait for the disk. Only for file systems that no
other machine looks at: another one has other boots, and may see the file half. (A disk that is taken away and comes
back in the same boot is not noticed.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from brim.memory.meter import boot_id
from brim.state.atomic_files import file_system, sync_file, sync_folder
from brim.state.ledger import Ledger

_OWN = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay", "bcachefs"}
_threads: dict[int, ThreadPoolExecutor] = {}  # by process: a fork has the object and not its thread


def boot_here(folder: Path) -> str:
    """This boot, if files of the folder may be synced later; else nothing, and they are synced as they are written."""
    return (boot_id() or "") if file_system(folder) in _OWN else ""


def sync_rest(ledger: Ledger, folder: Path) -> None:
    """Make the receipts last that count in this boot alone, with their files in `folder`.

    If the disk fails they are forgotten: it says so once, and the next sync of the same files would pass.
    """
    unsynced = [receipt for receipt in ledger.unsynced if (folder / receipt.name).exists()]
    if not unsynced:
        return
    try:
        for receipt in unsynced:
            sync_file(folder / receipt.name)
        sync_folder(folder)
    except OSError:
        for receipt in unsynced:
            ledger.forget(receipt.name)
        raise
    ledger.synced(unsynced)


def later(work: Callable[[], None]) -> None:
    """Have it done beside the program. When the program ends, it is waited for."""
    threads = _threads.get(os.getpid())
    if threads is None:
        _threads.clear()
        threads = _threads[os.getpid()] = ThreadPoolExecutor(1, "brim-sync")
    with suppress(RuntimeError):  # the program is ending: whoever opens it next does it
        threads.submit(work)
