# ruff: noqa: D103, PTH101, PTH110, PTH116, PTH118, PTH119, PTH123, PTH208, SIM115, S103, S108 - attempts are written as an attacker would, one call each
"""What a hostile job tries; runs inside an isolation and prints each attempt with how it ended, as JSON.

Standard input: {"canary": path, "port": N, "pid": N, "abstract": name, "shm": key, "readable": path}. "failed: …" is an
attempt that the isolation refused; everything else succeeded.
"""

import ctypes
import json
import os
import resource
import socket
import struct
import sys

GIVEN = json.load(sys.stdin)
LIBC = ctypes.CDLL(None, use_errno=True)
ATTEMPTS = {}


def attempt(function):
    ATTEMPTS[function.__name__] = function
    return function


def call(number, *arguments):
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@attempt
def read_the_password_file():
    return open("/etc/shadow").read(1)


@attempt
def read_the_owners_home():
    return open(GIVEN["home_file"]).read(1)


@attempt
def read_a_file_of_the_host():
    return open(GIVEN["canary"]).read()


@attempt
def read_it_through_the_root_of_process_1():
    return open(f"/proc/1/root{GIVEN['canary']}").read()


@attempt
def read_it_through_the_hosts_process():
    return open(f"/proc/{GIVEN['pid']}/root{GIVEN['canary']}").read()


@attempt
def write_the_system():
    open("/usr/stoker-was-here", "w").close()


@attempt
def write_the_interpreter():
    open(os.path.join(sys.base_prefix, "stoker-was-here"), "w").close()


@attempt
def write_what_is_only_readable():
    open(os.path.join(GIVEN["readable"], "stoker-was-here"), "w").close()


@attempt
def see_the_hosts_temporary_files():
    seen = [name for name in os.listdir("/tmp") if name == os.path.basename(GIVEN["canary"])]
    if not seen:
        raise OSError("not there")
    return seen


@attempt
def open_a_disk():
    for name in ("vda", "sda", "nvme0n1", "loop0"):
        if os.path.exists(f"/dev/{name}"):
            return open(f"/dev/{name}", "rb").read(1)
    raise OSError("no disk is there")


@attempt
def open_the_kernels_memory():
    return open("/dev/mem", "rb").read(1)


@attempt
def read_the_kernels_log():
    return open("/dev/kmsg", "rb").read(1)


@attempt
def make_a_device():
    os.mknod("/job/disk", 0o60666, os.makedev(254, 0))
    return open("/job/disk", "rb").read(1)


@attempt
def mount_a_file_system():
    call(165, b"none", b"/tmp", b"tmpfs", 0, b"")


@attempt
def change_the_root():
    os.chroot("/tmp")


@attempt
def become_root():
    os.setuid(0)


@attempt
def run_a_program_before_the_rights_are_dropped():
    """The order's variables name a log of the loader and a path with own programs: who wrote, and which of them ran?"""
    written = [name for name in os.listdir("/tmp") if name.startswith(("loader.", "path."))]
    others = [name for name in written if name.startswith("path.") or os.stat(f"/tmp/{name}").st_uid != os.getuid()]
    if others or not written:
        return others
    raise OSError("only the program itself was run with them")


@attempt
def make_a_user_namespace():
    call(272, 0x1000_0000)


@attempt
def clone_into_a_user_namespace():
    pid = LIBC.syscall(56, 0x1000_0000 | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    os.waitpid(pid, 0)


@attempt
def join_a_namespace_of_the_host():
    call(308, os.open(f"/proc/{GIVEN['pid']}/ns/net", os.O_RDONLY), 0)


@attempt
def open_a_file_by_its_handle():
    buffer = ctypes.create_string_buffer(struct.pack("Ii", 8, 1) + b"\0" * 120)
    call(304, os.open("/", os.O_RDONLY), buffer, os.O_RDONLY)


@attempt
def reach_a_port_of_the_host():
    socket.create_connection(("127.0.0.1", GIVEN["port"]), 2).close()


@attempt
def reach_the_internet():
    socket.create_connection(("1.1.1.1", 53), 2).close()


@attempt
def listen_to_packets():
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)


@attempt
def reach_the_virtual_machines_host():
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as line:
        line.settimeout(2)
        line.connect((2, 1024))


@attempt
def reach_a_local_socket_of_the_host():
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + GIVEN["abstract"])


@attempt
def signal_the_owner():
    os.kill(GIVEN["pid"], 0)
    stat = open(f"/proc/{GIVEN['pid']}/cmdline", "rb").read()
    if b"escape_attempts" in stat or not stat:
        raise OSError("it is one of our own")


@attempt
def trace_the_owner():
    call(101, 16, GIVEN["pid"], 0, 0)


@attempt
def read_the_owners_memory():
    buffer = ctypes.create_string_buffer(8)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    there = (ctypes.c_size_t * 2)(0x400000, 8)
    call(310, GIVEN["pid"], here, 1, there, 1, 0)


@attempt
def see_the_owners_processes():
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 200]
    if not others:
        raise OSError("none is there")
    return others


@attempt
def attach_the_owners_shared_memory():
    call(29, GIVEN["shm"], 4096, 0)


@attempt
def take_a_key_of_the_owner():
    call(250, 0, -4, 0)


@attempt
def load_a_program_into_the_kernel():
    call(321, 5, ctypes.create_string_buffer(128), 128)


@attempt
def watch_the_cpu():
    call(298, ctypes.create_string_buffer(struct.pack("IIQ", 1, 112, 0) + b"\0" * 96), -1, 0, -1, 0)


@attempt
def load_a_module():
    call(175, b"", 0, b"")


@attempt
def submit_to_io_uring():
    call(425, 8, ctypes.create_string_buffer(120))


@attempt
def change_a_setting_of_the_kernel():
    open("/proc/sys/kernel/core_pattern", "w").write("|/tmp/x")


@attempt
def press_a_magic_key():
    open("/proc/sysrq-trigger", "w").write("h")


@attempt
def leave_the_control_group():
    open("/sys/fs/cgroup/memory/cgroup.procs", "w").write(str(os.getpid()))


@attempt
def raise_the_limit_of_open_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))


@attempt
def take_the_cpu_for_itself():
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))


@attempt
def come_before_the_owner():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    if os.getpriority(os.PRIO_PROCESS, 0) >= before:
        raise OSError("no change")


@attempt
def set_the_clock():
    import time

    time.clock_settime(time.CLOCK_REALTIME, time.time())


@attempt
def make_a_program_that_is_root():
    path = "/job/root"
    open(path, "w").close()
    os.chmod(path, 0o4755)
    if os.stat(path).st_uid != 0:
        raise OSError("it is not root's")


results = {}
for name, function in ATTEMPTS.items():
    try:
        results[name] = f"succeeded: {function()!r}"
    except (OSError, ValueError, PermissionError) as error:
        results[name] = f"failed: {error}"
print(json.dumps(results))
