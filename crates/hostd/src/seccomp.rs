//! System call filters, as classic BPF.
//!
//! Lists of what is refused, not of what is allowed. A VMM's own filter (Firecracker's allow lists per thread, QEMU's
//! `-sandbox`) knows its calls better than we do and is there too; ours must hold for the libraries of every version the
//! operator may install, and takes away what no VMM needs and what kernel exploits are made of: namespaces, mounts, tracing,
//! other processes' memory, BPF, io_uring, user faults, keys, modules, time, and, by profile, sockets. What is refused
//! answers EPERM, as a missing privilege would; a foreign system call table (32-bit, x32) ends the process.

use nix::libc::{self, sock_filter};
use serde::{Deserialize, Serialize};

/// Who a filter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Profile {
    /// A VMM that inherits all its sockets and needs to make none.
    NoSockets,
    /// A VMM that makes Unix sockets itself, in its own folder.
    UnixSockets,
    /// A service of ours without root's rights: any socket, pipes with names, no new namespaces.
    Service,
    /// The root process and what it starts: only what none of them needs.
    Root,
}

/// What nothing of ours needs.
const NEVER: &[libc::c_long] = &[
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_kcmp,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_lookup_dcookie,
    libc::SYS_open_by_handle_at,
    libc::SYS_quotactl,
    libc::SYS_vhangup,
    libc::SYS_fanotify_init,
    libc::SYS_modify_ldt,
];

/// What only the root process needs.
const ROOT_ONLY: &[libc::c_long] = &[
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_mount_setattr,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_name_to_handle_at,
    libc::SYS_personality,
];

/// What a VMM that inherits its sockets does not need. QEMU does call `listen` on them.
const SOCKETS: &[libc::c_long] = &[libc::SYS_socket, libc::SYS_connect, libc::SYS_bind];

/// Bits of `clone` that make namespaces. `clone3` passes its flags by reference, out of a filter's sight: it answers that
/// there is no such call, and libraries then use `clone`.
const NEW_NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWCGROUP) as u32;

const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const X32_BIT: u32 = 0x4000_0000;
/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;
const THIRD_ARGUMENT: u32 = 32;
/// The one node that a service makes: a pipe, for itself and the VMM that it gives it to.
const PIPE: u32 = libc::S_IFIFO | 0o600;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const IF_ANY_BIT: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

fn step(code: u16, k: u32, yes: u8, no: u8) -> sock_filter {
    sock_filter { code, jt: yes, jf: no, k }
}

fn answer(errno: i32) -> sock_filter {
    step(RETURN, libc::SECCOMP_RET_ERRNO | errno as u32, 0, 0)
}

fn call(number: libc::c_long) -> u32 {
    u32::try_from(number).expect("system call numbers are small")
}

fn refuse(program: &mut Vec<sock_filter>, numbers: &[libc::c_long], errno: i32) {
    for number in numbers {
        program.extend([step(IF_EQUAL, call(*number), 0, 1), answer(errno)]);
    }
}

/// The program for a profile. Only for x86-64, as everything here is.
pub fn program(profile: Profile) -> Vec<sock_filter> {
    let kill = step(RETURN, libc::SECCOMP_RET_KILL_PROCESS, 0, 0);
    let mut program = vec![step(LOAD, ARCH, 0, 0), step(IF_EQUAL, AUDIT_ARCH_X86_64, 1, 0), kill];
    program.extend([step(LOAD, NUMBER, 0, 0), step(IF_AT_LEAST, X32_BIT, 0, 1), kill]);
    refuse(&mut program, NEVER, libc::EPERM);
    if profile == Profile::Service {
        program.extend([
            step(IF_EQUAL, call(libc::SYS_mknodat), 0, 4),
            step(LOAD, THIRD_ARGUMENT, 0, 0),
            step(IF_EQUAL, PIPE, 0, 1),
            step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
            step(LOAD, NUMBER, 0, 0),
        ]);
    }
    if profile != Profile::Root {
        refuse(&mut program, ROOT_ONLY, libc::EPERM);
        refuse(&mut program, &[libc::SYS_clone3], libc::ENOSYS);
        program.extend([
            step(IF_EQUAL, call(libc::SYS_clone), 0, 4),
            step(LOAD, FIRST_ARGUMENT, 0, 0),
            step(IF_ANY_BIT, NEW_NAMESPACES, 0, 1),
            answer(libc::EPERM),
            step(LOAD, NUMBER, 0, 0),
        ]);
    }
    if profile == Profile::NoSockets {
        refuse(&mut program, SOCKETS, libc::EPERM);
    }
    if profile == Profile::UnixSockets {
        program.extend([
            step(IF_EQUAL, call(libc::SYS_socket), 0, 4),
            step(LOAD, FIRST_ARGUMENT, 0, 0),
            step(IF_EQUAL, libc::AF_UNIX as u32, 1, 0),
            answer(libc::EPERM),
            step(LOAD, NUMBER, 0, 0),
        ]);
    }
    program.push(step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0));
    program
}

/// Puts a filter on this thread and all it starts; without root's rights only when new privileges are off. Safe between fork and
/// exec: system calls only.
pub(crate) fn install(program: &[sock_filter]) -> std::io::Result<()> {
    imp::install(program, 0)
}

/// Puts a filter on every thread of this process.
pub fn install_on_all_threads(program: &[sock_filter]) -> std::io::Result<()> {
    imp::install(program, libc::SECCOMP_FILTER_FLAG_TSYNC)
}

mod imp {
    #![allow(unsafe_code, reason = "the seccomp system call")]
    use nix::libc;

    pub(super) fn install(program: &[libc::sock_filter], flags: libc::c_ulong) -> std::io::Result<()> {
        let length = u16::try_from(program.len()).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        let filter = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut() };
        // SAFETY: the kernel reads `length` steps, which outlive the call, and writes nothing.
        let done = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &filter) };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the filter answers, by running it as the kernel would.
    fn run(program: &[sock_filter], number: u32, argument: u32, arch: u32) -> u32 {
        let (mut at, mut value) = (0, 0);
        loop {
            let s = program[at];
            at += 1;
            let jump = |yes: bool| usize::from(if yes { s.jt } else { s.jf });
            match s.code {
                LOAD if s.k == ARCH => value = arch,
                LOAD if s.k == NUMBER => value = number,
                LOAD => value = argument,
                IF_EQUAL => at += jump(value == s.k),
                IF_AT_LEAST => at += jump(value >= s.k),
                IF_ANY_BIT => at += jump(value & s.k != 0),
                _ => return s.k,
            }
        }
    }

    #[test]
    fn each_profile_refuses_what_it_says() {
        let eperm = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let ask = |profile, number: libc::c_long, argument: i32| {
            run(&program(profile), call(number), argument as u32, AUDIT_ARCH_X86_64)
        };
        let allow = libc::SECCOMP_RET_ALLOW;
        for profile in [Profile::NoSockets, Profile::UnixSockets, Profile::Service, Profile::Root] {
            assert_eq!(ask(profile, libc::SYS_bpf, 0), eperm);
            assert_eq!(ask(profile, libc::SYS_read, 0), allow);
            assert_eq!(ask(profile, libc::SYS_clone, libc::CLONE_VM), allow);
            let p = program(profile);
            assert_eq!(run(&p, call(libc::SYS_read), 0, 0x4000_0003), libc::SECCOMP_RET_KILL_PROCESS);
            assert_eq!(run(&p, X32_BIT | call(libc::SYS_read), 0, AUDIT_ARCH_X86_64), libc::SECCOMP_RET_KILL_PROCESS);
        }
        for profile in [Profile::NoSockets, Profile::UnixSockets, Profile::Service] {
            assert_eq!(ask(profile, libc::SYS_mount, 0), eperm);
            assert_eq!(ask(profile, libc::SYS_clone, libc::CLONE_NEWUSER), eperm);
        }
        for profile in [Profile::NoSockets, Profile::UnixSockets, Profile::Service] {
            let pipe = if profile == Profile::Service { allow } else { eperm };
            assert_eq!(ask(profile, libc::SYS_mknodat, PIPE as i32), pipe);
            assert_eq!(ask(profile, libc::SYS_mknodat, (libc::S_IFCHR | 0o600) as i32), eperm);
            assert_eq!(ask(profile, libc::SYS_mknod, PIPE as i32), eperm);
        }
        assert_eq!(ask(Profile::Root, libc::SYS_mount, 0), allow);
        assert_eq!(ask(Profile::Service, libc::SYS_socket, libc::AF_INET), allow);
        assert_eq!(ask(Profile::UnixSockets, libc::SYS_socket, libc::AF_INET), eperm);
        assert_eq!(ask(Profile::UnixSockets, libc::SYS_connect, 0), allow);
        assert_eq!(ask(Profile::NoSockets, libc::SYS_connect, 0), eperm);
        assert_eq!(ask(Profile::NoSockets, libc::SYS_socket, libc::AF_VSOCK), eperm);
    }
}
