"""The seccomp policy as the kernel's filter program, made once and kept.

An OCI runtime has libseccomp translate the policy anew at every start. That takes longer than the rest of the start
together (measured with crun 1.8: first output after 33 ms with the policy, 13 ms with the program, 12 ms with
neither). crun also takes a ready program, in the annotation ``run.oci.seccomp_bpf_data``. So the program is made
once, by the same library through its public interface, and kept in ``run/``. Without the library, or with runc, the
OCI runtime gets the policy.
"""

# pathlib costs more to import than this module.
# ruff: noqa: PTH105

from __future__ import annotations

import binascii
import os
import zlib

from runtimes.errors import RuntimesError
from runtimes.seccomp import policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ANNOTATION = "run.oci.seccomp_bpf_data"

_LIBRARY = "libseccomp.so.2"
# seccomp.h of libseccomp 2.5
_ACTIONS = {"SCMP_ACT_ALLOW": 0x7FFF0000, "SCMP_ACT_ERRNO": 0x00050000}
_COMPARE = {"SCMP_CMP_NE": 1, "SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
_CTL_OPTIMIZE, _BINARY_TREE = (
    8,
    2,
)  # shorter paths: the kernel walks the program for every call number when it installs it
_UNKNOWN_CALL = -1  # __NR_SCMP_ERROR
_EEXIST = 17
_INSTRUCTION = 8  # struct sock_filter
_MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS
_VERSION = 1  # of what this module makes of a policy


def filter_text(folder: str) -> str | None:
    """The program in base64, for the annotation; None when there is no library to make it with.

    It is kept in ``folder``. The name says what it was made from, so that another policy, or another machine's
    architecture, makes another.
    """
    rules = policy()
    fingerprint = zlib.crc32(repr((_VERSION, rules)).encode())
    path = f"{folder}/seccomp-{fingerprint:08x}.bpf"
    try:
        with open(path, "rb") as file:
            program = file.read()
    except FileNotFoundError:
        made = compile_policy(rules)
        if made is None:
            return None
        program = made
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "wb") as file:
            file.write(program)
        os.replace(temporary, path)
    if not 0 < len(program) <= _INSTRUCTION * _MAX_INSTRUCTIONS or len(program) % _INSTRUCTION:
        raise RuntimesError(f"{path} is not a seccomp filter: it has {len(program)} bytes; remove it")
    return binascii.b2a_base64(program, newline=False).decode()


def compile_policy(rules: dict[str, Any]) -> bytes | None:
    """Translate an OCI policy into a filter program (struct sock_filter, 8 bytes each). None without libseccomp 2.

    System calls that the library does not know are skipped, as OCI runtimes do. Raises RuntimesError when the library
    refuses a rule.
    """
    import ctypes

    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None

    class Argument(ctypes.Structure):  # struct scmp_arg_cmp
        _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))

    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_action(rules, "defaultAction", "defaultErrnoRet"))))
    if not context:
        raise RuntimesError("libseccomp: seccomp_init failed")
    try:
        for architecture in rules["architectures"]:
            name = architecture.removeprefix("SCMP_ARCH_").lower().encode()
            result = library.seccomp_arch_add(context, library.seccomp_arch_resolve_name(name))
            if result not in (0, -_EEXIST):
                raise RuntimesError(f"libseccomp: adding {architecture} failed: {os.strerror(-result)}")
        library.seccomp_attr_set(context, _CTL_OPTIMIZE, ctypes.c_uint32(_BINARY_TREE))
        for rule in rules["syscalls"]:
            action = ctypes.c_uint32(_action(rule, "action", "errnoRet"))
            given = rule.get("args", [])
            arguments = (Argument * max(1, len(given)))(
                *[Argument(a["index"], _COMPARE[a["op"]], a["value"], a["valueTwo"]) for a in given]
            )
            for name in rule["names"]:
                number = library.seccomp_syscall_resolve_name(name.encode())
                if number == _UNKNOWN_CALL:
                    continue
                result = library.seccomp_rule_add_array(context, action, number, len(given), arguments)
                if result:
                    raise RuntimesError(f"libseccomp: the rule for {name} was refused: {os.strerror(-result)}")
        memory = os.memfd_create("seccomp", os.MFD_CLOEXEC)
        try:
            result = library.seccomp_export_bpf(context, memory)
            if result:
                raise RuntimesError(f"libseccomp: no program came out: {os.strerror(-result)}")
            return os.pread(memory, os.fstat(memory).st_size, 0)
        finally:
            os.close(memory)
    finally:
        library.seccomp_release(context)


def _action(rule: dict[str, Any], key: str, errno_key: str) -> int:
    return _ACTIONS[rule[key]] | int(rule.get(errno_key, 0))
