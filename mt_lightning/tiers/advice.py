"""What to do about an error of the system, in a few words for the end of a message."""

from __future__ import annotations

import errno

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""No room: it may come back when something is deleted."""

NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
"""No file can be opened before another one is closed."""

PASSING = NO_DESCRIPTORS | {
    errno.EIO,
    errno.EAGAIN,
    errno.EINTR,
    errno.EBUSY,
    errno.ENOMEM,
    errno.ENOBUFS,
    errno.ETIMEDOUT,
    errno.EREMOTEIO,
    errno.ENOLINK,
    errno.ECOMM,
    errno.ECONNABORTED,
    errno.ECONNRESET,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
}
"""Errors that may be gone a moment later."""

_DRIVE = "look at the drive (dmesg, smartctl -a) and its cable, or give another offload_dir"
_GONE = "the directory or its drive was removed or unmounted: bring it back"
_RIGHTS = "give this user the right to read and write there"
_ROOM = "make room, add a directory to offload_dir, or lower max_disk_gb"
_DESCRIPTORS = "close files of your own, or raise the limit (ulimit -n)"

_ADVICE = {
    errno.EIO: _DRIVE,
    errno.EREMOTEIO: _DRIVE,
    errno.ETIMEDOUT: _DRIVE,
    errno.EBADMSG: _DRIVE,
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.ENODEV: _GONE,
    errno.ENXIO: _GONE,
    errno.ESTALE: _GONE,
    errno.ESHUTDOWN: _GONE,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "the file system became read-only: see dmesg for the reason, and mount it anew",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "a limit on the size of files is in force: raise it (ulimit -f)",
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _DESCRIPTORS,
}


def advice(number: int | None) -> str:
    """Return what to do about an errno, with the semicolon before it; empty where unknown."""
    known = _ADVICE.get(number or 0)
    return f"; {known}" if known else ""
