//! Tar streams and what they are compressed with.

use std::io::{Read as _, Write as _};

use space_image::ImageError;
use space_image::decompress;
use space_image::tarball::{Entry, Kind, MAX_LONG_NAME_BYTES, MAX_PAX_BYTES, MAX_SPARSE_RANGES, MAX_XATTRS, TarReader};
use tar::{EntryType, Header};

use crate::{Seed, seed};

const BLOCK: usize = 512;
/// More is not read out of what a few bytes unpack to.
const UNPACKED_MAX_BYTES: u64 = 4 << 20;

/// One member as a hostile writer makes it: names are not looked at.
pub(crate) fn member(kind: EntryType, name: &[u8], link: &[u8], data: &[u8]) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_mtime(1_600_000_000);
    let gnu = header.as_gnu_mut().expect("gnu");
    gnu.name[..name.len().min(100)].copy_from_slice(&name[..name.len().min(100)]);
    gnu.linkname[..link.len().min(100)].copy_from_slice(&link[..link.len().min(100)]);
    header.set_uid(0);
    header.set_gid(0);
    header.set_device_major(1).and_then(|()| header.set_device_minor(3)).expect("gnu");
    header.set_size(data.len() as u64);
    header.set_cksum();
    let mut out = [header.as_bytes(), data].concat();
    out.resize(out.len().next_multiple_of(BLOCK), 0);
    out
}

pub(crate) fn end(mut archive: Vec<u8>) -> Vec<u8> {
    archive.resize(archive.len() + 2 * BLOCK, 0);
    archive
}

/// Makes the checksum of each header right, so that what is behind the check is reached.
fn with_checksums(data: &[u8]) -> Vec<u8> {
    let mut out = data.to_vec();
    let mut at = 0;
    while let Some(block) = out.get_mut(at..).and_then(|rest| rest.get_mut(..BLOCK)) {
        let mut header = Header::from_byte_slice(block).clone();
        if block.iter().any(|byte| *byte != 0) {
            header.set_cksum();
            block.copy_from_slice(header.as_bytes());
        }
        let size = header.entry_size().ok().and_then(|size| usize::try_from(size).ok()).unwrap_or(0);
        at = size.checked_next_multiple_of(BLOCK).map_or(usize::MAX, |size| size.saturating_add(at + BLOCK));
    }
    out
}

fn check_entry(entry: &Entry) {
    let longest = usize::try_from(MAX_PAX_BYTES.max(MAX_LONG_NAME_BYTES)).expect("small");
    assert!(entry.path.len() <= longest && entry.link.len() <= longest);
    assert!(entry.xattrs.len() <= MAX_XATTRS && entry.ranges.len() <= MAX_SPARSE_RANGES);
    assert!(entry.mode <= 0o7777 && entry.mtime.1 < 1_000_000_000);
    let mut end = 0;
    for (offset, len) in &entry.ranges {
        assert!(*offset >= end, "ranges overlap");
        end = offset.checked_add(*len).expect("a range that ends");
        assert!(end <= entry.size, "a range beyond the end");
    }
    assert!(entry.kind == Kind::File || entry.ranges.is_empty() && entry.size == 0);
}

/// Reads to the end or to the error; every second payload is left for the reader to skip.
fn walk(archive: &[u8]) -> Result<(), ImageError> {
    let mut tar = TarReader::new(archive);
    let mut entries = 0;
    while let Some(entry) = tar.next_entry()? {
        check_entry(&entry);
        entries += 1;
        assert!(entries <= archive.len() / BLOCK, "entries out of nothing");
        if entries % 2 == 0 {
            continue;
        }
        let wanted: u64 = entry.ranges.iter().map(|(_, len)| len).sum();
        let (mut got, mut buffer) = (0, [0; 777]);
        loop {
            match tar.read(&mut buffer)? {
                0 => break,
                count => got += count as u64,
            }
        }
        assert!(got == wanted, "the payload is {got} bytes, its ranges are {wanted}");
    }
    Ok(())
}

/// Entries keep their bounds, sparse maps are in order and as long as their data, and nothing is made up.
pub fn read(data: &[u8]) {
    let _ = walk(data);
    let _ = walk(&with_checksums(data));
}

fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let len = (1..).map(|digits: usize| rest + digits).find(|len| len.to_string().len() + rest == *len);
        body.extend_from_slice(format!("{} {key}=", len.expect("a length")).as_bytes());
        body.extend_from_slice(value);
        body.push(b'\n');
    }
    member(EntryType::XHeader, b"pax", b"", &body)
}

fn old_sparse() -> Vec<u8> {
    let mut block = member(EntryType::GNUSparse, b"sparse", b"", b"data");
    let mut header = Header::from_byte_slice(&block[..BLOCK]).clone();
    let gnu = header.as_gnu_mut().expect("gnu");
    gnu.sparse[0].offset.copy_from_slice(b"00000010000\0");
    gnu.sparse[0].numbytes.copy_from_slice(b"00000000004\0");
    gnu.realsize.copy_from_slice(b"00000020000\0");
    header.set_cksum();
    block[..BLOCK].copy_from_slice(header.as_bytes());
    block
}

pub(crate) fn simple() -> Vec<u8> {
    let parts = [
        member(EntryType::Directory, b"etc/", b"", b""),
        member(EntryType::Regular, b"etc/hostname", b"", b"box\n"),
        member(EntryType::Symlink, b"link", b"etc/hostname", b""),
        member(EntryType::Link, b"hard", b"etc/hostname", b""),
        member(EntryType::Fifo, b"pipe", b"", b""),
        member(EntryType::Char, b"null", b"", b""),
    ];
    end(parts.concat())
}

pub fn seeds() -> Vec<Seed> {
    let file = |name: &[u8], data: &[u8]| member(EntryType::Regular, name, b"", data);
    let long = [
        member(EntryType::GNULongName, b"././@LongLink", b"", &[b"d/".repeat(80), vec![0]].concat()),
        member(EntryType::GNULongLink, b"././@LongLink", b"", &[b"t".repeat(150), vec![0]].concat()),
        member(EntryType::Symlink, b"short", b"short", b""),
    ];
    let records = pax(&[
        ("path", b"a/b"),
        ("mtime", b"-1.25"),
        ("uid", b"4000000"),
        ("SCHILY.xattr.user.a", b"x\ny\0z"),
        ("size", b"3"),
    ]);
    let sparse_0 = pax(&[("GNU.sparse.size", b"4096"), ("GNU.sparse.map", b"0,2,4094,2")]);
    let sparse_1 = pax(&[
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"s"),
        ("GNU.sparse.realsize", b"8192"),
    ]);
    let mut map = b"1\n4096\n4\n".to_vec();
    map.resize(BLOCK, 0);
    map.extend_from_slice(b"data");
    vec![
        seed("simple", simple()),
        seed("long_names", end(long.concat())),
        seed("pax", end([records, file(b"x", b"abc")].concat())),
        seed("sparse_old", end(old_sparse())),
        seed("sparse_0", end([sparse_0, file(b"x", b"abcd")].concat())),
        seed("sparse_1", end([sparse_1, file(b"x", &map)].concat())),
        seed("cut", &simple()[..700]),
    ]
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(data).and_then(|()| out.finish()).expect("in memory")
}

fn zstd(data: &[u8]) -> Vec<u8> {
    zstd::encode_all(data, 1).expect("in memory")
}

/// A stream of any bytes gives bytes or an error, step by step; what is compressed here comes back.
pub fn layer(data: &[u8]) {
    if let Ok(stream) = decompress::stream(data) {
        let mut unpacked = Vec::new();
        let end = stream.take(UNPACKED_MAX_BYTES).read_to_end(&mut unpacked);
        assert!(unpacked.len() as u64 <= UNPACKED_MAX_BYTES);
        if end.is_ok() && unpacked.len() < 64 << 10 {
            let _ = walk(&unpacked);
        }
    }
    if data.len() < 4096 {
        for packed in [gzip(data), zstd(data), [gzip(data), gzip(b"")].concat()] {
            let mut back = Vec::new();
            let end = decompress::stream(&packed[..]).expect("a known format").read_to_end(&mut back);
            assert!(end.is_ok() && back == data, "what was packed did not come back");
        }
    }
}

pub fn layer_seeds() -> Vec<Seed> {
    let bomb = vec![0; 1 << 20];
    vec![
        seed("plain", simple()),
        seed("gzip", gzip(&simple())),
        seed("zstd", zstd(&simple())),
        seed("gzip_members", [gzip(&simple()[..512]), gzip(&simple()[512..])].concat()),
        seed("gzip_zeros", gzip(&bomb)),
        seed("zstd_zeros", zstd(&bomb)),
        seed("gzip_cut", &gzip(&simple())[..60]),
        seed("xz", &b"\xfd7zXZ\0\0\x04"[..]),
    ]
}
