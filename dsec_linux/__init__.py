"""Thin typed functions over Linux system calls; the standard library only, and cheap to import.

One module for each part of the kernel's interface. A function does one call (or the few that only make sense together),
takes and gives plain descriptors, and raises ``errors.LinuxError``.
"""
