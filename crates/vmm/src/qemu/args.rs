//! QEMU's command line. Pure: a list of words from a specification.
//!
//! The machine is `microvm`: of those tried it has the smallest device state, the fastest start and the fewest lines of
//! device emulation that face the guest. Debian's kernel finds the virtio-mmio devices through ACPI. A restore leaves out
//! kernel and initramfs, whose bytes are in the memory already.

use space_hostd::jail;

use super::{Accel, QemuConfig};
use crate::VmSpec;
use crate::dir::{DISK, MEMORY};

/// Raise it with any change of machine or devices: saved states of another layout cannot be loaded.
pub(super) const LAYOUT: u32 = 1;
/// Bytes of console output that QEMU keeps until they are fetched. A power of two.
pub(super) const CONSOLE_BYTES: usize = 64 << 10;

/// Inherited descriptors by number. Files are named as they are in the jail.
pub(super) struct Fds {
    pub qmp: i32,
    pub agent: i32,
}

/// What the process is to begin with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    /// With the rate of the time stamp counter, where the guest cannot ask for it.
    Boot {
        tsc_khz: Option<u64>,
    },
    Incoming,
}

fn kernel_cmdline(spec: &VmSpec, tsc_khz: Option<u64>) -> String {
    // The guest's reset ends the VM, so a panic and a reboot do. Neither probes nor waits for what the machine lacks.
    let mut line =
        String::from("console=ttyS0 quiet panic=-1 reboot=t tsc=reliable random.trust_cpu=on cryptomgr.notests");
    if let Some(khz) = tsc_khz {
        // Emulation does not speculate; what works around it only costs there.
        line.push_str(&format!(" tsc_early_khz={khz} no_timer_check mitigations=off"));
    }
    if !spec.cmdline.is_empty() {
        line.push(' ');
        line.push_str(&spec.cmdline);
    }
    line
}

pub(super) fn build(config: &QemuConfig, spec: &VmSpec, fds: &Fds, begin: Begin) -> Vec<String> {
    let memory = spec.memory_mib;
    let (accel, cpu) = match config.accel {
        Accel::Tcg { code_cache_mib } => (format!("tcg,thread=multi,tb-size={code_cache_mib}"), "max"),
        Accel::Kvm => ("kvm".to_owned(), "host"),
    };
    let mut args: Vec<String> = Vec::new();
    let mut add = |words: &[&str]| args.extend(words.iter().map(|word| (*word).to_owned()));
    add(&["-name", "space", "-no-user-config", "-nodefaults", "-display", "none", "-nic", "none"]);
    add(&["-no-reboot", "-no-shutdown"]);
    add(&["-machine", "microvm,acpi=on,rtc=on,pic=off,pit=off,isa-serial=on,usb=off,memory-backend=ram"]);
    add(&["-accel", &accel, "-cpu", cpu, "-smp", &spec.vcpus.to_string(), "-m", &format!("{memory}M")]);
    add(&["-object", &format!("memory-backend-file,id=ram,size={memory}M,mem-path={MEMORY},share=on,dump=off")]);
    add(&["-global", "virtio-mmio.force-legacy=false", "-global", "migration.x-events=on"]);
    let disk = format!(
        "driver=file,node-name=file,filename={DISK},aio=threads,cache.direct=off,cache.no-flush=off,discard=unmap,locking=off"
    );
    add(&["-blockdev", &disk, "-blockdev", "driver=raw,node-name=disk,file=file,discard=unmap,detect-zeroes=off"]);
    add(&["-device", "virtio-blk-device,drive=disk,discard=on,write-cache=on,werror=enospc,rerror=report"]);
    add(&["-chardev", &format!("socket,id=agent,fd={},server=on,wait=off", fds.agent)]);
    add(&["-device", "virtio-serial-device,max_ports=2", "-device", "virtserialport,chardev=agent,name=space.agent"]);
    add(&["-object", "rng-random,id=rng,filename=/dev/urandom"]);
    add(&["-device", "virtio-rng-device,rng=rng,max-bytes=65536,period=1000"]);
    add(&["-chardev", &format!("ringbuf,id=console,size={CONSOLE_BYTES}"), "-serial", "chardev:console"]);
    add(&["-chardev", &format!("socket,id=qmp,fd={},server=on,wait=off", fds.qmp), "-mon", "chardev=qmp,mode=control"]);
    add(&["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]);
    match begin {
        Begin::Boot { tsc_khz } => {
            add(&["-kernel", jail::KERNEL, "-initrd", jail::INITRAMFS, "-append", &kernel_cmdline(spec, tsc_khz)]);
        }
        Begin::Incoming => add(&["-S", "-incoming", "defer"]),
    }
    args
}
