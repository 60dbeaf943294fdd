"""The system calls that a container may make: docker's default policy, in OCI form.

Everything that is not named here is EPERM. Names of calls that an architecture does not have are skipped by the OCI
runtime. Calls that docker ties to a capability are resolved for the default set (capabilities.py): chroot is in,
everything of CAP_SYS_ADMIN, CAP_SYS_PTRACE, CAP_BPF and the like is out, and so are io_uring and userfaultfd.
"""

from __future__ import annotations

import os

_READ_AND_WRITE = """
    read readv pread64 preadv preadv2 write writev pwrite64 pwritev pwritev2 lseek _llseek readahead
    sendfile sendfile64 splice tee vmsplice copy_file_range
    open openat openat2 creat close close_range dup dup2 dup3 fcntl fcntl64 flock ioctl
    fsync fdatasync sync syncfs sync_file_range fallocate fadvise64 fadvise64_64
    truncate truncate64 ftruncate ftruncate64
    io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents io_pgetevents_time64
"""

_FILES_AND_FOLDERS = """
    access faccessat faccessat2 stat stat64 lstat lstat64 fstat fstat64 fstatat64 newfstatat statx
    statfs statfs64 fstatfs fstatfs64 readlink readlinkat getcwd chdir fchdir getdents getdents64
    mkdir mkdirat rmdir link linkat unlink unlinkat symlink symlinkat rename renameat renameat2 mknod mknodat
    chmod fchmod fchmodat fchmodat2 chown chown32 fchown fchown32 lchown lchown32 fchownat umask
    utime utimes futimesat utimensat utimensat_time64
    getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr flistxattr listxattrat
    setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
    inotify_init inotify_init1 inotify_add_watch inotify_rm_watch fanotify_mark name_to_handle_at chroot
"""

_MEMORY = """
    brk mmap mmap2 munmap mremap mprotect madvise msync mincore mlock mlock2 mlockall munlock munlockall mseal
    remap_file_pages membarrier memfd_create memfd_secret pkey_alloc pkey_free pkey_mprotect map_shadow_stack
    cachestat
"""

_WAITING = """
    select _newselect pselect6 pselect6_time64 poll ppoll ppoll_time64
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_wait epoll_wait_old epoll_pwait epoll_pwait2
    eventfd eventfd2 pipe pipe2 signalfd signalfd4
    timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64
    futex futex_time64 futex_wait futex_wake futex_waitv futex_requeue set_robust_list get_robust_list rseq
"""

_NETWORK = """
    socketpair bind listen accept accept4 connect shutdown getsockname getpeername getsockopt setsockopt
    send sendto sendmsg sendmmsg recv recvfrom recvmsg recvmmsg recvmmsg_time64 socketcall
"""

_PROCESSES = """
    fork vfork execve execveat exit exit_group wait4 waitid waitpid restart_syscall
    getpid getppid gettid set_tid_address getpgid setpgid getpgrp getsid setsid
    kill tkill tgkill pidfd_open pidfd_send_signal process_mrelease pause
    rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_tgsigqueueinfo rt_sigreturn rt_sigsuspend
    rt_sigtimedwait rt_sigtimedwait_time64 sigaltstack sigprocmask sigreturn
    prctl seccomp ptrace process_vm_readv process_vm_writev
    landlock_create_ruleset landlock_add_rule landlock_restrict_self
    get_thread_area set_thread_area
"""

_IDENTITY = """
    getuid getuid32 geteuid geteuid32 getgid getgid32 getegid getegid32 getgroups getgroups32
    getresuid getresuid32 getresgid getresgid32
    setuid setuid32 setgid setgid32 setgroups setgroups32 setreuid setreuid32 setregid setregid32
    setresuid setresuid32 setresgid setresgid32 setfsuid setfsuid32 setfsgid setfsgid32
    capget capset
"""

_SCHEDULING_AND_LIMITS = """
    sched_yield sched_getaffinity sched_setaffinity sched_getattr sched_setattr sched_getparam sched_setparam
    sched_getscheduler sched_setscheduler sched_get_priority_max sched_get_priority_min
    sched_rr_get_interval sched_rr_get_interval_time64 getpriority setpriority ioprio_get ioprio_set getcpu
    getrlimit setrlimit ugetrlimit prlimit64 getrusage times sysinfo uname getrandom
"""

_TIME = """
    time gettimeofday nanosleep alarm getitimer setitimer adjtimex clock_adjtime clock_adjtime64
    clock_gettime clock_gettime64 clock_getres clock_getres_time64 clock_nanosleep clock_nanosleep_time64
    timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64
"""

_SYSTEM_V_AND_QUEUES = """
    ipc semget semctl semop semtimedop semtimedop_time64 shmget shmat shmctl shmdt msgget msgctl msgsnd msgrcv
    mq_open mq_unlink mq_getsetattr mq_notify
    mq_timedsend mq_timedsend_time64 mq_timedreceive mq_timedreceive_time64
"""

_OF_ONE_ARCHITECTURE = {
    "x86_64": "arch_prctl modify_ldt",
    "aarch64": "arm_fadvise64_64 arm_sync_file_range sync_file_range2 breakpoint cacheflush set_tls",
}

# The machine's own, and those of the 32-bit programs that its kernel runs.
_ARCHITECTURES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET: clone(2) is for processes and threads alone.
_NEW_NAMESPACES = 0x7E020000
# The flags of clone3(2) lie behind a pointer, where a filter cannot look. ENOSYS lets a C library fall back on clone.
_ENOSYS = 38
_EPERM = 1
_AF_VSOCK = 40  # would reach the hypervisor
# PER_LINUX, PER_LINUX32, UNAME26, both, and the question for the present one.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)


def allowed_names(machine: str) -> list[str]:
    """The calls that are allowed whatever their arguments."""
    groups = (
        _READ_AND_WRITE,
        _FILES_AND_FOLDERS,
        _MEMORY,
        _WAITING,
        _NETWORK,
        _PROCESSES,
        _IDENTITY,
        _SCHEDULING_AND_LIMITS,
        _TIME,
        _SYSTEM_V_AND_QUEUES,
        _OF_ONE_ARCHITECTURE.get(machine, ""),
    )
    return " ".join(groups).split()


def _argument(index: int, op: str, value: int, second: int = 0) -> dict[str, object]:
    return {"index": index, "value": value, "valueTwo": second, "op": op}


def policy(machine: str | None = None) -> dict[str, object]:
    """The ``linux.seccomp`` of an OCI config, for ``machine`` as uname(2) spells it (default: this one)."""
    machine = machine or os.uname().machine
    allow = "SCMP_ACT_ALLOW"
    rules: list[dict[str, object]] = [
        {"names": allowed_names(machine), "action": allow},
        {"names": ["socket"], "action": allow, "args": [_argument(0, "SCMP_CMP_NE", _AF_VSOCK)]},
        {"names": ["clone"], "action": allow, "args": [_argument(0, "SCMP_CMP_MASKED_EQ", _NEW_NAMESPACES)]},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
    ]
    for personality in _PERSONALITIES:
        rules.append(
            {"names": ["personality"], "action": allow, "args": [_argument(0, "SCMP_CMP_EQ", personality)]},
        )
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _EPERM,
        "architectures": _ARCHITECTURES.get(machine, []),
        "syscalls": rules,
    }
