//! The first file system of a guest: our daemon as `/init` and the kernel modules it loads, as a cpio archive.
//!
//! The archive is the same for the same input, byte for byte, and is not compressed: unpacking costs an emulated guest
//! more than reading does.

use std::io::{self, Write};
use std::path::Path;

use crate::VmmError;
use crate::guest_kernel::Module;

/// Where the guest finds the list of modules, one file name a line, in the order of loading.
pub const MODULE_ORDER: &str = "modules/order";

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Writes the "newc" form of cpio.
struct Cpio<W> {
    out: W,
    inode: u32,
    written: usize,
}

impl<W: Write> Cpio<W> {
    fn new(out: W) -> Self {
        Cpio { out, inode: 0, written: 0 }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written += bytes.len();
        Ok(())
    }

    fn align(&mut self) -> io::Result<()> {
        let surplus = self.written % 4;
        if surplus == 0 { Ok(()) } else { self.put(&[0; 3][..4 - surplus]) }
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), data: &[u8]) -> io::Result<()> {
        let size = u32::try_from(data.len()).map_err(|_| io::Error::other("a file of more than 4 GiB"))?;
        let name_size = u32::try_from(name.len() + 1).map_err(|_| io::Error::other("an endless name"))?;
        self.inode += 1;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        // inode, mode, uid, gid, links, mtime, size, dev major/minor, rdev major/minor, name size, check
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0];
        let header: String = fields.iter().map(|field| format!("{field:08x}")).collect();
        self.put(b"070701")?;
        self.put(header.as_bytes())?;
        self.put(name.as_bytes())?;
        self.put(&[0])?;
        self.align()?;
        self.put(data)?;
        self.align()
    }

    fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.out)
    }
}

fn write(modules: &[Module], daemon: &[u8], out: impl Write) -> io::Result<()> {
    let mut cpio = Cpio::new(out);
    for folder in ["dev", "proc", "sys", "modules"] {
        cpio.entry(folder, DIRECTORY, (0, 0), &[])?;
    }
    // The kernel opens it for PID 1 before anything is mounted.
    cpio.entry("dev/console", CHARACTER_DEVICE, (5, 1), &[])?;
    cpio.entry("init", PROGRAM, (0, 0), daemon)?;
    let mut order = String::new();
    for (index, module) in modules.iter().enumerate() {
        let name = format!("{index:02}-{}.ko", module.name);
        cpio.entry(&format!("modules/{name}"), FILE, (0, 0), &std::fs::read(&module.path)?)?;
        order += &name;
        order.push('\n');
    }
    cpio.entry(MODULE_ORDER, FILE, (0, 0), order.as_bytes())?;
    cpio.finish()?.flush()
}

/// Writes the archive to `out`, under a passing name first: `out` is never half of one.
pub fn build(modules: &[Module], daemon: &Path, out: &Path) -> Result<(), VmmError> {
    let failed = |action: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| VmmError::File { action, path, source }
    };
    let program = std::fs::read(daemon).map_err(failed("read", daemon))?;
    let unfinished = out.with_extension("new");
    let file = std::fs::File::create(&unfinished).map_err(failed("create", &unfinished))?;
    write(modules, &program, io::BufWriter::new(&file)).map_err(failed("write", &unfinished))?;
    file.sync_all().map_err(failed("write", &unfinished))?;
    std::fs::rename(&unfinished, out).map_err(failed("put in place", out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_aligned_entries_and_an_end() {
        let mut out = Vec::new();
        write(&[], b"#!", &mut out).unwrap();
        assert_eq!(out.len() % 4, 0);
        assert!(out.starts_with(b"070701"));
        let text = String::from_utf8_lossy(&out);
        for name in ["dev\0", "dev/console\0", "init\0", "modules/order\0", "TRAILER!!!\0"] {
            assert!(text.contains(name), "{name}");
        }
        let mut again = Vec::new();
        write(&[], b"#!", &mut again).unwrap();
        assert_eq!(out, again);
    }
}
