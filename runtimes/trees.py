"""Removing a file tree that others filled: any depth, any names, any number of entries, never through a symlink."""

# PTH101, PTH102, PTH106

from __future__ import annotations

import os

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str, last: str = "") -> None:
    """Remove a directory and everything in it; nothing is there when it returns, also when it was not there before.
    A file directly in it named ``last`` goes after everything else.

    A folder in a folder is moved up beside its parent before it is looked into, so that neither the recursion
    limit, nor the length of a path, nor the number of open files bounds the depth. Two at once do not disturb each
    other.
    """
    try:
        root = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    moved = 0
    try:
        while names := _empty(root, last):
            for name in names:
                try:
                    folder = os.open(name, _FOLDER, dir_fd=root)
                except FileNotFoundError:
                    continue
                try:
                    for child in _empty(folder):
                        moved += 1
                        try:
                            os.rename(child, f".gone-{os.getpid()}-{moved}", src_dir_fd=folder, dst_dir_fd=root)
                        except FileNotFoundError:
                            continue
                finally:
                    os.close(folder)
                _rmdir(name, root)
        _empty(root)
    finally:
        os.close(root)
    _rmdir(path, None)


def _empty(folder: int, spared: str = "") -> list[str]:
    """Remove what is no directory, but for ``spared``, and the empty directories; the names of the others."""
    left = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            try:
                if entry.name == spared:
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                elif not _rmdir(entry.name, folder):
                    left.append(entry.name)
            except FileNotFoundError:
                continue
    return left


def _rmdir(name: str, folder: int | None) -> bool:
    """Whether it is gone; it is not when there is something in it."""
    try:
        os.rmdir(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (39, 17):  # ENOTEMPTY, EEXIST
            raise
        return False
    return True
