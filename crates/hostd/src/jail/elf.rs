//! Which files a program needs to start: asked of its own loader, which is the one that will look for them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::JailError;

const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 56;
const ENTRIES_MAX: u16 = 64;
const PT_INTERP: u32 = 3;
const PATH_BYTES: usize = 256;

fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    bytes[at..at + size].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// The loader that a 64-bit ELF program names; `None` for a static one.
fn interpreter(path: &Path) -> Result<Option<PathBuf>, JailError> {
    let failed = |source| JailError::File { action: "read", path: path.to_owned(), source };
    let bad = |why: &str| JailError::BadProgram { path: path.to_owned(), why: why.to_owned() };
    let file = File::open(path).map_err(failed)?;
    let mut header = [0; HEADER_BYTES];
    match file.read_exact_at(&mut header, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(bad("it is too short")),
        other => other.map_err(failed)?,
    }
    // Magic, 64 bits, little endian.
    if header[..6] != *b"\x7fELF\x02\x01" {
        return Err(bad("it is not a 64-bit ELF file; a script cannot be jailed"));
    }
    let (table, size, count) = (number(&header, 32, 8), number(&header, 54, 2), number(&header, 56, 2));
    if size != ENTRY_BYTES as u64 || count > u64::from(ENTRIES_MAX) {
        return Err(bad("its program headers are of an unknown form"));
    }
    for index in 0..count {
        let mut entry = [0; ENTRY_BYTES];
        file.read_exact_at(&mut entry, table.saturating_add(index * size)).map_err(failed)?;
        if number(&entry, 0, 4) == u64::from(PT_INTERP) {
            let mut name = [0; PATH_BYTES];
            let length = usize::try_from(number(&entry, 32, 8)).unwrap_or(usize::MAX).min(PATH_BYTES);
            file.read_exact_at(&mut name[..length], number(&entry, 8, 8)).map_err(failed)?;
            let text = String::from_utf8_lossy(&name[..length]);
            let path = PathBuf::from(text.trim_end_matches('\0'));
            return if path.is_absolute() { Ok(Some(path)) } else { Err(bad("its loader has no absolute path")) };
        }
    }
    Ok(None)
}

/// The loader and every library it would map for `program`. Empty for a static program. Nothing of the program is run.
pub fn needs(program: &Path, loader_of: &Path) -> Result<Vec<PathBuf>, JailError> {
    let Some(loader) = interpreter(loader_of)? else { return Ok(Vec::new()) };
    let output = Command::new(&loader).arg("--list").arg(program).env_clear().stdin(Stdio::null()).output();
    let output = output.map_err(|source| JailError::File { action: "run", path: loader.clone(), source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut files = vec![loader];
    for line in text.lines() {
        // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f…)", "/lib64/ld-linux-x86-64.so.2 (0x…)", "linux-vdso.so.1 (0x…)"
        let target = line.split_once(" => ").map_or(line, |(_, target)| target).trim();
        let path = target.split(" (0x").next().unwrap_or_default();
        if path.starts_with('/') {
            files.push(PathBuf::from(path));
        } else if target.contains("not found") {
            let why = format!("a library is missing: {}", line.trim());
            return Err(JailError::BadProgram { path: program.to_owned(), why });
        }
    }
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).trim().chars().take(300).collect();
        return Err(JailError::BadProgram { path: program.to_owned(), why });
    }
    files.sort();
    files.dedup();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_needs_its_loader_and_libraries() {
        let own = std::env::current_exe().unwrap();
        let files = needs(&own, &own).unwrap();
        assert!(files.iter().any(|file| file.to_string_lossy().contains("libc.so")), "{files:?}");
        assert!(files.iter().all(|file| file.is_file()), "{files:?}");
    }

    #[test]
    fn a_script_and_a_torn_file_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [("script", "#!/bin/sh\n".repeat(20)), ("short", "\x7fELF".to_owned())] {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            assert!(matches!(needs(&path, &path), Err(JailError::BadProgram { .. })), "{name}");
        }
    }
}
