"""The system calls that an isolated job may not make, as a filter that the kernel runs.

What: a seccomp filter in classic BPF, handed to bubblewrap as a file. Refused with EPERM is what reaches around
namespaces or grows the kernel's exposed surface: mounts, new namespaces, tracing, keys, modules, BPF, io_uring, raw
handles of files. Of sockets only local, IPv4, IPv6 and the routing socket that `getifaddrs` needs: AF_VSOCK would reach
the host of a virtual machine whatever the network namespace says.
Use when: bubblewrap; Podman and gVisor have filters of their own. Costs: nanoseconds a call.

Source: seccomp(2), Linux asm/unistd_64.h; the list follows the default profiles of Docker and Flatpak.
"""

from __future__ import annotations

import struct

MACHINE = "x86_64"
"""The only machine whose numbers are listed."""

REFUSED = {
    "ptrace": 101,
    "syslog": 103,
    "vhangup": 153,
    "modify_ldt": 154,
    "pivot_root": 155,
    "adjtimex": 159,
    "chroot": 161,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "sethostname": 170,
    "setdomainname": 171,
    "iopl": 172,
    "ioperm": 173,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "nfsservctl": 180,
    "lookup_dcookie": 212,
    "clock_settime": 227,
    "mbind": 237,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "migrate_pages": 256,
    "unshare": 272,
    "move_pages": 279,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "clock_adjtime": 305,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
}
"""Refused with EPERM, by number."""

REFUSED_UNCOUNTED = {"shmget": 29, "msgget": 68, "memfd_create": 319, "memfd_secret": 447}
"""Refused where no control group counts memory: it would be held without being in any process's resident set."""

_CLONE, _SOCKET, _SOCKETPAIR, _CLONE3, _IOCTL = 56, 41, 53, 435, 16
_NEW_NAMESPACES = 0x7E02_0000
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AUDIT_ARCH_X86_64, _X32 = 0xC000_003E, 0x4000_0000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ALLOW, _ERRNO, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24


def filter_program(*, has_hidden_memory: bool) -> bytes:
    """The filter as the kernel reads it: instructions of 8 bytes each.

    Args:
        has_hidden_memory: whether memory may be held that no process maps; a control group counts it.
    """
    program: list[tuple[int, int, int, int]] = []

    def add(code: int, value: int, yes: int = 0, no: int = 0) -> None:
        program.append((code, yes, no, value))

    add(_LOAD, _ARCH)
    add(_EQUAL, _AUDIT_ARCH_X86_64, 1, 0)
    add(_RETURN, _KILL)  # 32-bit calls have other numbers
    add(_LOAD, _NUMBER)
    add(_AT_LEAST, _X32, 0, 1)
    add(_RETURN, _ERRNO | _ENOSYS)
    for number in (*REFUSED.values(), *(() if has_hidden_memory else REFUSED_UNCOUNTED.values())):
        add(_EQUAL, number, 0, 1)
        add(_RETURN, _ERRNO | _EPERM)
    add(_EQUAL, _CLONE3, 0, 1)  # its flags are in memory, which a filter cannot read: libraries fall back to clone
    add(_RETURN, _ERRNO | _ENOSYS)
    add(_EQUAL, _CLONE, 0, 4)
    add(_LOAD, _FIRST_ARGUMENT)
    add(_ANY_BIT, _NEW_NAMESPACES, 0, 1)
    add(_RETURN, _ERRNO | _EPERM)
    add(_LOAD, _NUMBER)
    for call in (_SOCKET, _SOCKETPAIR):
        add(_EQUAL, call, 0, len(_FAMILIES) + 3)
        add(_LOAD, _FIRST_ARGUMENT)
        for index, family in enumerate(_FAMILIES):
            add(_EQUAL, family, len(_FAMILIES) - index, 0)
        add(_RETURN, _ERRNO | _EAFNOSUPPORT)
        add(_LOAD, _NUMBER)
    add(_EQUAL, _IOCTL, 0, 4)
    add(_LOAD, _SECOND_ARGUMENT)
    add(_EQUAL, _TIOCSTI, 1, 0)
    add(_EQUAL, _TIOCLINUX, 0, 1)
    add(_RETURN, _ERRNO | _EPERM)
    add(_RETURN, _ALLOW)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
