//! Tries whether `/dev/kvm` runs what an ordinary kernel does: a tiny guest in long mode that uses the instructions a kernel
//! needs first. Takes at most a second, whatever the hypervisor does.
#![allow(
    unsafe_code,
    reason = "the KVM interface: ioctls, a mapping of the run page, and a signal to end a hung guest"
)]

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::mpsc;
use std::time::Duration;

use nix::libc::{self, c_int, c_ulong, c_void};

const LIMIT: Duration = Duration::from_secs(1);
const KVM_GET_API_VERSION: c_ulong = 0xae00;
const KVM_CREATE_VM: c_ulong = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: c_ulong = 0xae04;
const KVM_CREATE_VCPU: c_ulong = 0xae41;
const KVM_RUN: c_ulong = 0xae80;
const KVM_SET_USER_MEMORY_REGION: c_ulong = 0x4020_ae46;
const KVM_GET_SUPPORTED_CPUID: c_ulong = 0xc008_ae05;
const KVM_SET_CPUID2: c_ulong = 0x4008_ae90;
const KVM_SET_REGS: c_ulong = 0x4090_ae82;
const KVM_GET_SREGS: c_ulong = 0x8138_ae83;
const KVM_SET_SREGS: c_ulong = 0x4138_ae84;
const EXIT_IO: u32 = 2;
const EXIT_HLT: u32 = 5;

const MEMORY: usize = 0x20_0000;
const CODE: u64 = 0x8000;
const PORT: u8 = 0xf4;

/// Each step ends by writing its number to a port, so that the last one seen names the instruction that failed.
const STEPS: [(&str, &[u8]); 8] = [
    ("out", &[]),
    ("cpuid", &[0x31, 0xc0, 0x0f, 0xa2]),
    ("rdmsr/wrmsr of the APIC base", &[0xb9, 0x1b, 0, 0, 0, 0x0f, 0x32, 0x0f, 0x30]),
    ("rdmsr of EFER", &[0xb9, 0x80, 0, 0, 0xc0, 0x0f, 0x32]),
    ("popcnt", &[0xf3, 0x0f, 0xb8, 0xc1]),
    ("mov cr0", &[0x0f, 0x20, 0xc0, 0x0f, 0x22, 0xc0]),
    ("mov cr3", &[0x0f, 0x20, 0xd8, 0x0f, 0x22, 0xd8]),
    ("swapgs", &[0x0f, 0x01, 0xf8, 0x0f, 0x01, 0xf8]),
];

/// What came of the trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trial {
    Passed,
    Failed(String),
}

#[repr(C)]
struct MemoryRegion {
    slot: u32,
    flags: u32,
    guest: u64,
    size: u64,
    host: u64,
}

#[repr(C)]
#[derive(Default)]
struct Regs {
    /// rax rbx rcx rdx rsi rdi rsp rbp r8..r15
    general: [u64; 16],
    rip: u64,
    rflags: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Segment {
    base: u64,
    limit: u32,
    selector: u16,
    kind: u8,
    present: u8,
    dpl: u8,
    db: u8,
    s: u8,
    l: u8,
    g: u8,
    avl: u8,
    unusable: u8,
    padding: u8,
}

#[repr(C)]
struct Sregs {
    /// cs ds es fs gs ss tr ldt
    segments: [Segment; 8],
    /// gdt, idt
    tables: [[u64; 2]; 2],
    cr0: u64,
    cr2: u64,
    cr3: u64,
    cr4: u64,
    cr8: u64,
    efer: u64,
    apic_base: u64,
    interrupts: [u64; 4],
}

const CPUID_ENTRIES: usize = 256;

#[repr(C)]
struct Cpuid {
    count: u32,
    padding: u32,
    entries: [[u32; 10]; CPUID_ENTRIES],
}

/// An anonymous or device mapping, unmapped when dropped.
struct Mapping {
    at: *mut c_void,
    size: usize,
}

impl Mapping {
    fn new(size: usize, fd: Option<RawFd>) -> Result<Self, String> {
        let flags = if fd.is_some() { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags, fd.unwrap_or(-1), 0) };
        if at == libc::MAP_FAILED { Err(last("mmap")) } else { Ok(Mapping { at, size }) }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is that long, readable and writable, and borrowed through `self` only.
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.size) }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Reads what the kernel wrote at `at`.
    fn byte(&self, at: usize) -> u8 {
        assert!(at < self.size, "within the mapping");
        // SAFETY: inside the mapping; volatile since the kernel writes it.
        unsafe { self.at.cast::<u8>().add(at).read_volatile() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody uses it any more.
        unsafe { libc::munmap(self.at, self.size) };
    }
}

fn last(what: &str) -> String {
    format!("{what}: {}", std::io::Error::last_os_error())
}

fn ioctl(what: &str, fd: RawFd, request: c_ulong, argument: *mut c_void) -> Result<c_int, String> {
    // SAFETY: each caller passes the argument that its request takes, alive during the call.
    let result = unsafe { libc::ioctl(fd, request, argument) };
    if result < 0 { Err(last(what)) } else { Ok(result) }
}

fn own(fd: c_int) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn pointer<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

fn guest_memory() -> Result<Mapping, String> {
    let mut memory = Mapping::new(MEMORY, None)?;
    // Page tables: one page of 2 MiB, identity.
    memory.put(0x1000, &(0x2000_u64 | 3).to_le_bytes());
    memory.put(0x2000, &(0x3000_u64 | 3).to_le_bytes());
    memory.put(0x3000, &0x83_u64.to_le_bytes());
    let mut code = Vec::new();
    for (number, (_, instructions)) in STEPS.iter().enumerate() {
        code.extend_from_slice(instructions);
        code.extend_from_slice(&[0xb0, number as u8, 0xe6, PORT]);
    }
    code.push(0xf4);
    memory.put(CODE as usize, &code);
    Ok(memory)
}

fn set_registers(vcpu: RawFd) -> Result<(), String> {
    let blank = Segment {
        base: 0,
        limit: u32::MAX,
        selector: 0,
        kind: 3,
        present: 1,
        dpl: 0,
        db: 0,
        s: 1,
        l: 0,
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    };
    let mut sregs = Sregs {
        segments: [blank; 8],
        tables: [[0; 2]; 2],
        cr0: 0,
        cr2: 0,
        cr3: 0,
        cr4: 0,
        cr8: 0,
        efer: 0,
        apic_base: 0,
        interrupts: [0; 4],
    };
    ioctl("reading registers", vcpu, KVM_GET_SREGS, pointer(&mut sregs))?;
    for segment in &mut sregs.segments[..6] {
        *segment = Segment { selector: 16, ..blank };
    }
    sregs.segments[0] = Segment { selector: 8, kind: 11, l: 1, ..blank };
    sregs.cr3 = 0x1000;
    sregs.cr4 = 1 << 5;
    sregs.cr0 = 0x8000_0011;
    sregs.efer = 0x500;
    ioctl("setting registers", vcpu, KVM_SET_SREGS, pointer(&mut sregs))?;
    let mut regs = Regs { rip: CODE, rflags: 2, ..Regs::default() };
    regs.general[6] = 0x7000;
    ioctl("setting registers", vcpu, KVM_SET_REGS, pointer(&mut regs)).map(drop)
}

/// Runs the guest to its end; `Err` says where it got stuck.
fn run() -> Result<(), String> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm").map_err(|error| error.to_string())?;
    let kvm = kvm.as_raw_fd();
    let version = ioctl("its version", kvm, KVM_GET_API_VERSION, std::ptr::null_mut())?;
    if version != 12 {
        return Err(format!("it speaks interface version {version}, not 12"));
    }
    let vm = own(ioctl("making a VM", kvm, KVM_CREATE_VM, std::ptr::null_mut())?);
    let memory = guest_memory()?;
    let mut region = MemoryRegion { slot: 0, flags: 0, guest: 0, size: MEMORY as u64, host: memory.at as u64 };
    ioctl("giving it memory", vm.as_raw_fd(), KVM_SET_USER_MEMORY_REGION, pointer(&mut region))?;
    let vcpu = own(ioctl("making a CPU", vm.as_raw_fd(), KVM_CREATE_VCPU, std::ptr::null_mut())?);
    let mut cpuid = Box::new(Cpuid { count: CPUID_ENTRIES as u32, padding: 0, entries: [[0; 10]; CPUID_ENTRIES] });
    ioctl("reading CPU features", kvm, KVM_GET_SUPPORTED_CPUID, pointer(&mut *cpuid))?;
    ioctl("setting CPU features", vcpu.as_raw_fd(), KVM_SET_CPUID2, pointer(&mut *cpuid))?;
    let size = ioctl("its run page", kvm, KVM_GET_VCPU_MMAP_SIZE, std::ptr::null_mut())?;
    let page = Mapping::new(usize::try_from(size).unwrap_or(0), Some(vcpu.as_raw_fd()))?;
    set_registers(vcpu.as_raw_fd())?;
    let mut step = 0;
    loop {
        let at = STEPS.get(step).map_or("hlt", |(name, _)| name);
        ioctl(&format!("the guest stopped at {at}"), vcpu.as_raw_fd(), KVM_RUN, std::ptr::null_mut())?;
        let reason = u32::from_le_bytes([page.byte(8), page.byte(9), page.byte(10), page.byte(11)]);
        match reason {
            // The data of the write lies where the run page says, right behind it.
            EXIT_IO => step += 1,
            EXIT_HLT if step == STEPS.len() => return Ok(()),
            other => return Err(format!("the guest stopped at {at} with exit reason {other}")),
        }
        if step > STEPS.len() {
            return Err("the guest repeats itself".to_owned());
        }
    }
}

extern "C" fn interrupted(_signal: c_int) {}

/// Runs the trial on a thread of its own and ends it by a signal when it takes longer than a second.
pub(crate) fn attempt() -> Trial {
    // The last real-time signal: no runtime or library of ours uses it.
    let signal = libc::SIGRTMAX();
    // SAFETY: the handler does nothing; without SA_RESTART the ioctl returns when it has run.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = interrupted as *const () as usize;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
    let (sender, receiver) = mpsc::channel();
    let (name_sender, name) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        // SAFETY: names the calling thread.
        let _ = name_sender.send(unsafe { libc::pthread_self() } as usize);
        let _ = sender.send(run());
    });
    let result = receiver.recv_timeout(LIMIT);
    if let (Err(_), Ok(name)) = (&result, name.recv()) {
        // SAFETY: the thread is not joined yet, so its name is valid.
        unsafe { libc::pthread_kill(name as libc::pthread_t, signal) };
    }
    // After the signal the run returns with EINTR, an error, and the thread ends.
    let _ = thread.join();
    match result {
        Ok(Ok(())) => Trial::Passed,
        Ok(Err(why)) => Trial::Failed(why),
        Err(_) => Trial::Failed(format!("the trial guest did not end within {LIMIT:?}")),
    }
}
