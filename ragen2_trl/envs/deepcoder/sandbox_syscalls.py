"""Which system calls a program may make: a filter for the kernel, written out byte by byte; see seccomp(2).

The list is what CPython and its standard library were seen to call (`strace` over a program that imports all of the
library and uses most of it), with the older and newer forms of the same calls that other versions of the C library
make. What is on no list is refused, whatever a later kernel adds. Calls that serve several ends are let through with
some arguments only. There is no fork and no exec among them.

Without a library (`libseccomp`), because what is needed of one is the assembler below, and because the filter is made
outside and loaded inside, where no package is in sight.
"""

import errno
import platform
import struct
from collections.abc import Iterator

# Number of the architecture in a filter's input, and its column in the tables below.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name:number on x86_64:number on aarch64
_ALLOWED = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 lseek:8:62
open:2:- openat:257:56 creat:85:- close:3:57 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 sendfile:40:71
fsync:74:82 fdatasync:75:83 ftruncate:77:46 truncate:76:45 fadvise64:221:223 stat:4:- fstat:5:80
lstat:6:- newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 access:21:- faccessat:269:48
faccessat2:439:439 readlink:89:- readlinkat:267:78 getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50
mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276
link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 chmod:90:- fchmod:91:52 fchmodat:268:53 utimensat:280:88
umask:95:166
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232:- epoll_pwait:281:22 eventfd2:290:19 recvfrom:45:207 shutdown:48:210 getsockname:51:204
getpeername:52:205
mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 msync:26:227 brk:12:214
futex:202:98 exit:60:93 exit_group:231:94 set_robust_list:273:99 rseq:334:293 restart_syscall:219:128 wait4:61:260
sched_yield:24:124 sched_getaffinity:204:123 sched_getscheduler:145:120 sched_getparam:143:121 getcpu:309:168
nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:-
times:100:153 getrusage:98:165 getitimer:36:102 setitimer:38:103 alarm:37:- pause:34:-
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigsuspend:130:133 sigaltstack:131:132
getpid:39:172 gettid:186:178 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
getgroups:115:158 getresuid:118:148 getresgid:120:150 getpgid:121:155 getpgrp:111:- getsid:124:156
getpriority:140:141 getrlimit:97:163 uname:63:160 sysinfo:99:179 getrandom:318:278
"""
# Memory that no limit counts. Refused as a file system does that has none, which `shutil.copy2` expects.
_EXTENDED_ATTRIBUTES = """
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
llistxattr:195:12 flistxattr:196:13 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16
"""
_BY_ARGUMENT = """
clone:56:220 close_range:436:436 prctl:157:167 prlimit64:302:261 fcntl:72:25 ioctl:16:29 socketpair:53:199
sendto:44:206 setrlimit:160:164 kill:62:129 tkill:200:130 tgkill:234:131
"""
_THREAD = (0x3D0F00, 0x7D0F00)  # the flags of clone(2) with which glibc and musl start a thread
# The argument that decides, counted from 0, and the values that pass.
_ONLY = {
    "clone": (0, _THREAD),
    "close_range": (2, (0,)),  # no flags: CLOSE_RANGE_UNSHARE makes a table of descriptors for each thread
    "prctl": (0, (15, 16)),  # PR_SET_NAME, PR_GET_NAME
    "prlimit64": (0, (0,)),  # its own limits, not those of the namespace's first process
    # Descriptors, flags and F_GETPIPE_SZ; record locks would be memory that no limit counts.
    "fcntl": (1, (0, 1, 2, 3, 4, 1030, 1032)),
    # TCGETS and TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": (1, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    "socketpair": (0, (1,)),  # AF_UNIX: how asyncio wakes itself
    "sendto": (5, (0,)),  # to the other end, no address
}
# The argument that decides and the value that does not pass: SIGKILL, and RLIMIT_CPU, at which the kernel sends it, so
# that it can only have come from the kernel, and at our limits.
_ALL_BUT = {"kill": (1, 9), "tkill": (1, 9), "tgkill": (2, 9), "setrlimit": (0, 0), "prlimit64": (1, 0)}
_UNIFIED = 424  # from here on calls have one number everywhere, and libraries ask whether the kernel knows them

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ, ..., BPF_RET
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x50000
Step = tuple[int, int, int, int]  # operation, steps to jump if it holds and if not, operand
_PASS: Step = (_RETURN, 0, 0, _ALLOW)
_REFUSE: Step = (_RETURN, 0, 0, _ERRNO | errno.EPERM)


def allowed_calls(machine: str | None = None) -> list[str]:
    """The names of all calls that pass, with whichever arguments."""
    return [*_numbers(_ALLOWED, machine), *_numbers(_BY_ARGUMENT, machine)]


def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter as the kernel takes it.

    Args:
        machine: `x86_64` or `aarch64`; by default this one.
    """
    return b"".join(struct.pack("HBBI", *step) for step in _steps(machine or platform.machine()))


def _numbers(table: str, machine: str | None) -> dict[str, int]:
    column = ARCHITECTURES[machine or platform.machine()][1]
    rows = (row.split(":") for row in table.split())
    return {name: int(numbers[column]) for name, *numbers in rows if numbers[column] != "-"}


def _steps(machine: str) -> Iterator[Step]:
    yield from ((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, ARCHITECTURES[machine][0]), (_RETURN, 0, 0, _KILL))
    yield from ((_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL))  # x32's, of the same number
    for number in _numbers(_ALLOWED, machine).values():
        yield from ((_EQUAL, 0, 1, number), _PASS)
    for number in _numbers(_EXTENDED_ATTRIBUTES, machine).values():
        yield from ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EOPNOTSUPP))
    for name, number in _numbers(_BY_ARGUMENT, machine).items():
        steps = list(_by_argument(name))
        yield from ((_EQUAL, 0, len(steps), number), *steps)
    yield from ((_AT_LEAST, 0, 1, _UNIFIED), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS), _REFUSE)


def _by_argument(name: str) -> Iterator[Step]:
    """Of an argument the lower half, which is all that the kernel takes of these."""
    if name in _ONLY:
        argument, values = _ONLY[name]
        yield (_LOAD, 0, 0, 16 + 8 * argument)
        for left, value in zip(range(len(values), 0, -1), values, strict=True):
            yield (_EQUAL, left, 0, value)
        yield _REFUSE
    if name in _ALL_BUT:
        argument, value = _ALL_BUT[name]
        yield from ((_LOAD, 0, 0, 16 + 8 * argument), (_EQUAL, 0, 1, value), _REFUSE)
    yield _PASS
