//! Digests over content: of large sparse files, at the cost of their data only, and of a template
//! as a whole. The results are names of things: changing how they are computed is a new version.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{ImageError, IoContext, Result};
use crate::oci::hex;
use crate::progress::{self, Progress};

const BLOCK: u64 = 4096;
const CHUNK: u64 = 1 << 20;
const FILE_VERSION: &[u8] = b"space sparse file v1\0";

/// SHA-256 (lower-case hex) over the size and over each 4 KiB block that is not all zeros, with
/// its offset. A hole and written zeros are the same. Only data is read.
pub fn file_sha256_sparse(path: &Path, progress: &dyn Progress) -> Result<String> {
    let what = || format!("read {}", path.display());
    let file = File::open(path).ctx(what)?;
    let size = file.metadata().ctx(what)?.len();
    let mut hash = Sha256::new();
    hash.update(FILE_VERSION);
    hash.update(size.to_le_bytes());
    let mut buf = vec![0u8; CHUNK as usize];
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start / BLOCK * BLOCK,
            Err(Errno::NXIO) => break,
            Err(e) => return Err(e).ctx(what),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(start.max(at))).ctx(what)?.next_multiple_of(BLOCK).min(size);
        at = start;
        while at < end {
            progress::check(progress)?;
            let want = usize::try_from((end - at).min(CHUNK)).unwrap_or(CHUNK as usize);
            let piece = &mut buf[..want];
            file.read_exact_at(piece, at).ctx(what)?;
            for (i, block) in piece.chunks(BLOCK as usize).enumerate() {
                if !is_zero(block) {
                    hash.update((at + i as u64 * BLOCK).to_le_bytes());
                    hash.update(block);
                }
            }
            at += want as u64;
            progress.bytes(at, Some(size));
        }
    }
    Ok(hex(&hash.finalize()))
}

/// Whether a piece of up to 64 KiB is all zeros. A comparison: quick also without optimisation.
pub(crate) fn is_zero(piece: &[u8]) -> bool {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    ZEROS.get(..piece.len()) == Some(piece)
}

/// Gives zeros back to the file system, written ones (in pieces of 64 KiB) and space that was only
/// reserved. The content stays the same.
pub(crate) fn dig_holes(file: &File, progress: &dyn Progress) -> std::io::Result<()> {
    const PIECE: u64 = 64 << 10;
    let punch = |from: u64, to: u64| {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match to > from {
            true => rustix::fs::fallocate(file, flags, from, to - from),
            false => Ok(()),
        }
    };
    let size = file.metadata()?.len();
    let mut buf = vec![0u8; PIECE as usize];
    let mut at = 0;
    while at < size && !progress.cancelled() {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => size,
            Err(e) => return Err(e.into()),
        };
        punch(at, data)?;
        if data == size {
            break;
        }
        let end = rustix::fs::seek(file, SeekFrom::Hole(data))?;
        at = data;
        while at < end {
            let next = (at + 1).next_multiple_of(PIECE).min(end);
            let piece = &mut buf[..usize::try_from(next - at).unwrap_or(0)];
            file.read_exact_at(piece, at)?;
            if is_zero(piece) {
                punch(at, next)?;
            }
            at = next;
        }
    }
    Ok(())
}

/// One file of a template.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ManifestEntry {
    pub name: String,
    /// Bytes, holes included.
    pub size: u64,
    /// Lower-case hex, from [`file_sha256_sparse`].
    pub sha256: String,
}

impl ManifestEntry {
    /// Describes a file under the name it has in the template.
    pub fn of_file(name: &str, path: &Path, progress: &dyn Progress) -> Result<Self> {
        let meta = std::fs::metadata(path).ctx(|| format!("read {}", path.display()))?;
        Ok(Self { name: name.to_owned(), size: meta.len(), sha256: file_sha256_sparse(path, progress)? })
    }
}

/// SHA-256 (lower-case hex) over the canonical JSON of entries, sorted by name, and options. Two
/// entries of one name are an error.
pub fn manifest(entries: &[ManifestEntry], options: &BTreeMap<String, String>) -> Result<String> {
    #[derive(Serialize)]
    struct Canonical<'a> {
        version: u32,
        entries: Vec<&'a ManifestEntry>,
        options: &'a BTreeMap<String, String>,
    }
    let mut sorted: Vec<&ManifestEntry> = entries.iter().collect();
    sorted.sort();
    if let Some(pair) = sorted.windows(2).find(|p| p[0].name == p[1].name) {
        return Err(ImageError::image(format!("two files of a template have the name `{}`", pair[0].name)));
    }
    let json = serde_json::to_vec(&Canonical { version: 1, entries: sorted, options }).map_err(ImageError::image)?;
    Ok(hex(&Sha256::digest(json)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;

    fn sparse(pieces: &[(u64, &[u8])], size: u64) -> String {
        let f = tempfile::NamedTempFile::new().unwrap();
        f.as_file().set_len(size).unwrap();
        for (at, data) in pieces {
            f.as_file().write_all_at(data, *at).unwrap();
        }
        file_sha256_sparse(f.path(), &NoProgress).unwrap()
    }

    #[test]
    fn holes_and_zeros_are_the_same() {
        let data = [7u8; 5000];
        let zeros = vec![0u8; 300_000];
        let a = sparse(&[(1 << 20, &data)], 3 << 20);
        let b = sparse(&[(0, &zeros), (1 << 20, &data), (2 << 20, &zeros)], 3 << 20);
        assert_eq!(a, b);
        assert_ne!(a, sparse(&[((1 << 20) + 4096, &data)], 3 << 20), "offset counts");
        assert_ne!(a, sparse(&[(1 << 20, &data)], (3 << 20) + 1), "size counts");
        assert_ne!(sparse(&[], 0), sparse(&[], 1));
        // A tail shorter than a block, and data up to the very end.
        assert_ne!(sparse(&[(8192, b"x")], 8193), sparse(&[], 8193));
    }

    #[test]
    fn only_data_is_read() {
        let start = std::time::Instant::now();
        let size = 1 << 40;
        sparse(&[(0, b"a"), (size - 10, b"z")], size);
        assert!(start.elapsed() < std::time::Duration::from_secs(2));
    }

    #[test]
    fn manifests_do_not_depend_on_order() {
        let e = |n: &str| ManifestEntry { name: n.into(), size: 1, sha256: "00".into() };
        let none = BTreeMap::new();
        let ab = manifest(&[e("a"), e("b")], &none).unwrap();
        assert_eq!(ab, manifest(&[e("b"), e("a")], &none).unwrap());
        assert_ne!(ab, manifest(&[e("a")], &none).unwrap());
        let some = BTreeMap::from([("memory".to_owned(), "512".to_owned())]);
        assert_ne!(ab, manifest(&[e("a"), e("b")], &some).unwrap());
        assert!(manifest(&[e("a"), e("a")], &none).is_err());
    }
}
